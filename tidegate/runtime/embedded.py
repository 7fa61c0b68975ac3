"""The servers that Tidegate brings along: nats-server with JetStream and valkey, children of this process.

Invariants:
- the binaries are those of the installed packages, never what PATH finds;
- they listen on 127.0.0.1 only, keep all data and logs in the given folder, and acknowledge only what is on disk, so
  that a start in the same folder goes on where the last one ended, however it ended;
- one folder serves one set of servers: a lock on it, which the servers inherit, is held until the last has exited;
- a server dies with this process (start them from its main thread: `tidegate.runtime.tied`) and is out of reach of
  the terminal's Ctrl-C, so that whoever uses them can finish first;
- `start` returns when both answer, and are the ones it started.
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
from pathlib import Path

from tidegate.runtime.server_kinds import NATS, VALKEY, ServerKind, packaged_binary

START_TIMEOUT_S = 20.0
"""Both answer within 0.1 s; a log of a long job takes seconds to be read again."""
STOP_GRACE_S = 5.0
LOCK_TIMEOUT_S = 1.0
"""How long to wait for the servers of a killed predecessor, which die with it, to be gone."""
_POLL_S = 0.005
_NUM_PORT_CHOICES = 5
_LOG_TAIL_BYTES = 600


class ServerFailed(RuntimeError):
    """A server did not come up; the text holds the end of its log."""


class PortTaken(ServerFailed):
    """Another process listens on the port that a server was told to use."""


class FolderInUse(RuntimeError):
    """Servers of another process run in the folder."""


class EmbeddedServer:
    """One server. Its port is chosen at the first start and stays; pid and pidfd are those of the last start."""

    def __init__(self, kind: ServerKind, folder: Path, *, port: int | None, stop_grace_s: float) -> None:
        self._kind = kind
        self._stop_grace_s = stop_grace_s
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1

    @property
    def name(self) -> str:
        return self._kind.name

    @property
    def port(self) -> int:
        assert self._port is not None, f"{self.name} was never started"
        return self._port

    @property
    def url(self) -> str:
        return f"{self._kind.url_scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def pidfd(self) -> int:
        """Readable once the server is dead. Closed by `stop` and the next `start`: duplicate it to keep it."""
        self._started()
        return self._pidfd

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        return self._folder / f"{self.name}.log"

    async def start(self, *, lock_fd: int) -> None:
        """Nothing happens while it runs. ServerPackageMissing, PortTaken, ServerFailed."""
        if self.is_running:
            return
        if self._port is not None:
            await self._start_at(self._port, lock_fd)
            return
        for num_left in reversed(range(_NUM_PORT_CHOICES)):
            port = _free_port()
            try:
                await self._start_at(port, lock_fd)
                self._port = port
                return
            except PortTaken:  # between the choice and the start: choose again
                if num_left == 0:
                    raise

    async def exited(self) -> int:
        """Waits for its death; the exit status, negative for a signal."""
        process = self._started()
        await _readable(self._pidfd)
        return process.wait()

    async def stop(self) -> None:
        """Asks it to end, kills it after `stop_grace_s`. Nothing happens when it does not run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.exited(), self._stop_grace_s)
            except TimeoutError:  # it hangs: data acknowledged is on disk, so a kill loses nothing
                self._process.kill()
                self._process.wait()
        self._forget()

    def _forget(self) -> None:
        if self._process is not None:
            self._process.wait()
            os.close(self._pidfd)
        self._process, self._pidfd = None, -1

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} is not started"
        return self._process

    async def _start_at(self, port: int, lock_fd: int) -> None:
        _refuse_taken(self.name, port)
        self._forget()
        self._launch(port, lock_fd)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.is_running and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # not listening yet: asked again
                if await self._kind.is_ready(port, self.pid):
                    return
            await asyncio.sleep(_POLL_S)
        ended = "did not answer" if self.is_running else f"exited with status {self._started().poll()}"
        await self.stop()
        _refuse_taken(self.name, port)
        tail = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        raise ServerFailed(
            f"{self.name} {ended} within {START_TIMEOUT_S:g} s of its start on 127.0.0.1:{port}; the end of "
            f"{self.log_path}:\n{tail}"
        )

    def _launch(self, port: int, lock_fd: int) -> None:
        binary = packaged_binary(self._kind)
        tied = Path(__file__).with_name("tied.py")
        tie = [sys.executable, "-I", "-S", str(tied), str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*tie, str(binary), *self._kind.arguments(self._folder, port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                pass_fds=(lock_fd,),
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._process.pid)


class EmbeddedServers:
    """Both servers, with their data in one folder. `start` also restarts whichever died, on its old port and data."""

    def __init__(
        self,
        folder: Path,
        *,
        nats_port: int | None = None,
        store_port: int | None = None,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._folder = folder.absolute()
        self._lock_fd = -1
        self.nats = EmbeddedServer(NATS, self._folder, port=nats_port, stop_grace_s=stop_grace_s)
        self.store = EmbeddedServer(VALKEY, self._folder, port=store_port, stop_grace_s=stop_grace_s)

    async def __aenter__(self) -> EmbeddedServers:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """FolderInUse, ServerPackageMissing, PortTaken, ServerFailed; then none of them runs."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._lock_fd < 0:
            self._lock_fd = await _lock(self._folder)
        try:
            for server in (self.nats, self.store):
                await server.start(lock_fd=self._lock_fd)
        except BaseException:  # a cancelled start leaves nothing behind either
            await self.stop()
            raise

    async def stop(self) -> None:
        await asyncio.gather(self.nats.stop(), self.store.stop())
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def first_exit(self) -> EmbeddedServer:
        """Waits until one of them is dead."""
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
    own = os.dup(fd)  # a loop knows one callback a descriptor, and several may wait
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
        except BlockingIOError:  # a predecessor's servers may be about to die: asked again until the deadline
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
                f"{name} cannot listen on 127.0.0.1:{port} ({error.strerror}): stop what listens there or choose "
                "another port"
            ) from error
