"""The servers that Tidegate brings along: nats-server with JetStream and valkey, children of this process.

Invariants:
- The binaries are those of the installed packages, never those on PATH. [test_embedded: found_without_a_path]
- The servers listen only on 127.0.0.1. [test_embedded: answer_on_loopback_only]
- They keep all data and logs in one folder and acknowledge only data that is on disk. So a start in the same folder
  continues where the last one ended, however it ended. [test_embedded: a_killed_server_is]
- One folder serves one set of servers. The servers inherit a lock on it, which lasts until the last has exited.
  [test_embedded: folder_in_use_is_refused]
- A server dies with this process. Start it from the main thread: `tidegate.runtime.dies_with_parent`.
  [test_embedded: servers_die_with_a_killed_parent]
- Who is let in later disturbs nobody, and who is put out has no right any more. [test_server_guard: let_in_later]
- The terminal's Ctrl-C does not reach a server, so that its users can finish first.
  [test_embedded: interrupt_does_not_reach_the_servers]
- Servers outlive a new program of this process (`handover`), which has their numbers and the lock.
  [test_handover: servers_live_on]
- `start` returns when both servers answer and are the ones that it started.
  [test_embedded: a_taken_port_is]
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tidegate.runtime.processes import ChildByPid
from tidegate.runtime.server_kinds import NATS, VALKEY, Running, ServerGuard, ServerKind, packaged_binary

START_TIMEOUT_S = 20.0
"""Both answer within 0.1 s. To read the log of a long job again takes seconds."""
STOP_GRACE_S = 5.0
LOCK_TIMEOUT_S = 1.0
"""How long to wait for the servers of a killed predecessor, which die with it."""
_POLL_S = 0.005
_NUM_PORT_CHOICES = 5
_LOG_TAIL_BYTES = 600
_MOST_LOG_BYTES = 16 * 2**20
"""A server begins another log then, and the one before stays beside it."""


class ServerFailed(RuntimeError):
    """A server did not start. The text has the end of its log."""


class PortTaken(ServerFailed):
    """Another process listens on the server's configured port."""


class FolderInUse(RuntimeError):
    """Servers of another process run in the folder."""


@dataclass(frozen=True, slots=True)
class RunningServers:
    """Servers of this process under its earlier program. A pid is None where the server has died."""

    lock_fd: int
    nats: tuple[int, int | None]
    store: tuple[int, int | None]
    """Port and pid."""


class EmbeddedServer:
    """One server. Its port is chosen at the first start and stays. pid and pidfd are those of the last start.

    `env` is added to this process's environment.
    """

    def __init__(
        self,
        kind: ServerKind,
        folder: Path,
        *,
        port: int | None,
        stop_grace_s: float,
        guard: ServerGuard | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._kind = kind
        self._guard = guard
        self._env = {**os.environ, **(env or {})}
        self._stop_grace_s = stop_grace_s
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | ChildByPid | None = None
        self._pidfd = -1

    def take(self, port: int, pid: int | None) -> None:
        """One that this process has started under its earlier program."""
        self._port = port
        if pid is not None:
            self._process, self._pidfd = ChildByPid(pid), os.pidfd_open(pid)

    @property
    def name(self) -> str:
        return self._kind.name

    @property
    def port(self) -> int:
        assert self._port is not None, f"{self.name} was never started"
        return self._port

    @property
    def url(self) -> str:
        scheme = self._kind.url_scheme if self._guard is None else self._kind.guarded_scheme
        return f"{scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._running_process().pid

    @property
    def pidfd(self) -> int:
        """Readable once the server is dead. `stop` and the next `start` close it: duplicate it to keep it."""
        self._running_process()
        return self._pidfd

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        return self._folder / f"{self.name}.log"

    async def start(self, *, lock_fd: int) -> None:
        """Does nothing while the server runs. ServerPackageMissing, PortTaken, ServerFailed."""
        if self.is_running:
            return
        if self._port is not None:
            await self._start_at(self._port, lock_fd)
            return
        for num_further in reversed(range(_NUM_PORT_CHOICES)):
            port = _free_port()
            try:
                await self._start_at(port, lock_fd)
                self._port = port
                return
            except PortTaken:  # another process took the port after the choice: choose again
                if num_further == 0:
                    raise

    async def let_in(self, guard: ServerGuard, *, anew: bool = False) -> None:
        """Lets in whom `guard` has, and nobody else. Its users of before, who are among them, notice nothing. `anew`:
        the rules for users may be others than those that the server has. OSError where the server does not take it:
        start it again then."""
        assert self._guard is not None, "a server without a guard lets everybody in"
        before, self._guard = self._guard, guard
        known = replace(before, users=()) if anew else before
        try:
            self._kind.arguments(self._folder, self.port, guard)  # the files that a start reads, and NATS now
            if self.is_running:
                await self._kind.reload(Running(self.port, self.pid, self.log_path), known, guard)
        except (OSError, EOFError) as error:
            self._guard = before  # so that the next call tells the server of these users again
            raise OSError(f"{self.name} was not told who is let in: {error}") from error

    async def exited(self) -> int:
        """Waits for the server's death. Returns the exit status, negative for a signal."""
        process = self._running_process()
        await _readable(self._pidfd)
        return process.wait()

    async def stop(self) -> None:
        """Asks the server to end and kills it after `stop_grace_s`. Does nothing when it does not run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.exited(), self._stop_grace_s)
            except TimeoutError:  # it hangs: acknowledged data is on disk, so a kill loses nothing
                self._process.kill()
                self._process.wait()
        self._forget()

    def _forget(self) -> None:
        if self._process is not None:
            self._process.wait()
            os.close(self._pidfd)
        self._process, self._pidfd = None, -1

    def _running_process(self) -> subprocess.Popen[bytes] | ChildByPid:
        assert self._process is not None, f"{self.name} is not started"
        return self._process

    async def _start_at(self, port: int, lock_fd: int) -> None:
        _refuse_taken(self.name, port)
        self._forget()
        self._launch(port, lock_fd)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.is_running and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # not listening yet: ask again
                if await self._kind.is_ready(port, self.pid, self._guard):
                    return
            await asyncio.sleep(_POLL_S)
        ended = "did not answer" if self.is_running else f"exited with status {self._running_process().poll()}"
        await self.stop()
        _refuse_taken(self.name, port)
        tail = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        raise ServerFailed(
            f"{self.name} {ended} within {START_TIMEOUT_S:g} s of its start on 127.0.0.1:{port}; the end of "
            f"{self.log_path}:\n{tail}"
        )

    def _launch(self, port: int, lock_fd: int) -> None:
        binary = packaged_binary(self._kind)
        program = Path(__file__).with_name("dies_with_parent.py")
        tie = [sys.executable, "-I", "-S", str(program), str(os.getpid())]
        with contextlib.suppress(FileNotFoundError):
            if self.log_path.stat().st_size > _MOST_LOG_BYTES:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*tie, str(binary), *self._kind.arguments(self._folder, port, self._guard)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._env,
                pass_fds=(lock_fd,),
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._process.pid)


class EmbeddedServers:
    """Both servers, with their data in one folder. `start` also restarts a dead one, on its old port and data."""

    def __init__(
        self,
        folder: Path,
        *,
        guard: ServerGuard | None = None,
        nats_port: int | None = None,
        store_port: int | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        store_env: Mapping[str, str] | None = None,
        running: RunningServers | None = None,
    ) -> None:
        """Without a `guard` any process of this machine may connect. `store_env` is added to the environment of the
        store's server. `running`: those that run already, with this guard."""
        self._folder = folder.absolute()
        self._lock_fd = -1
        self._one_at_a_time = asyncio.Lock()
        made = partial(EmbeddedServer, folder=self._folder, stop_grace_s=stop_grace_s, guard=guard)
        self.nats = made(NATS, port=nats_port)
        self.store = made(VALKEY, port=store_port, env=store_env)
        if running is not None:
            self._lock_fd = running.lock_fd
            self.nats.take(*running.nats)
            self.store.take(*running.store)

    @property
    def running(self) -> RunningServers:
        """For a program that takes the place of this one."""
        nats, store = ((each.port, each.pid if each.is_running else None) for each in (self.nats, self.store))
        return RunningServers(self._lock_fd, nats, store)

    async def __aenter__(self) -> EmbeddedServers:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pids(self) -> set[int]:
        """The servers that run or have just died."""
        return {each.pid for each in (self.nats, self.store) if each.is_started}

    async def start(self) -> None:
        """FolderInUse, ServerPackageMissing, PortTaken, ServerFailed: then none of them runs."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with self._one_at_a_time:
            if self._lock_fd < 0:
                self._lock_fd = await _lock(self._folder)
            try:
                for server in (self.nats, self.store):
                    await server.start(lock_fd=self._lock_fd)
            except BaseException:  # a cancelled start must not leave a server behind either
                await self.stop()
                raise

    async def stop(self) -> None:
        await asyncio.gather(self.nats.stop(), self.store.stop())
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def let_in(self, guard: ServerGuard, *, anew: bool = False) -> None:
        """As `EmbeddedServer.let_in`, for both. A server that is just starting is told once it answers."""
        async with self._one_at_a_time:
            for server in (self.nats, self.store):
                await server.let_in(guard, anew=anew)

    async def first_exit(self) -> EmbeddedServer:
        """Waits until one server is dead."""
        waits = {asyncio.ensure_future(server.exited()): server for server in (self.nats, self.store)}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return next(server for wait, server in waits.items() if wait in done)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    own = os.dup(fd)  # a loop allows one callback for each descriptor, and several tasks may wait
    loop.add_reader(own, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(own)
        os.close(own)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _lock(folder: Path) -> int:
    path = folder / "servers.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:  # a predecessor's servers may be about to die: try again until the deadline
            if time.monotonic() > deadline_s:
                os.close(fd)
                raise FolderInUse(
                    f"servers of another run use {folder} (waited {LOCK_TIMEOUT_S:g} s for {path}): end that run, or "
                    "choose another output folder"
                ) from None
        await asyncio.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _refuse_taken(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortTaken(
                f"{name} cannot listen on 127.0.0.1:{port} ({error.strerror}): stop the process that listens there or "
                "choose another port"
            ) from error
