"""Starts services as forks of a process that has imported them, in place of new interpreters.

    python -m tidegate.runtime.spawner CONNECTION_FD LAUNCHER_PID MODULE,... ROOM

A service imports for a second of a core before it does anything, and a job has seven of them. The launcher starts the
spawner, which imports while the launcher does other things. For each service it forks twice, and the first fork ends at
once. So the kernel gives the service to its nearest subreaper, which the launcher has made itself: the launcher is the
service's parent, as if it had started it. ROOM is room for the services' command lines, which `ps` shows.

A launcher that is itself the fork of a spawner has its modules already: its own spawner is a fork of it, and imports
nothing.

    launcher -> spawner -> (ended) -> service        launcher -> service

Invariants:
- The launcher is the parent of a service, which leads a session of its own and dies with the launcher.
  [test_spawner: is_a_child_of_its_launcher]
- A service whose launcher has died before it was the service's parent ends. [test_spawner: whose_launcher_is_gone]
- A service has none of the spawner's descriptors. [test_spawner: is_a_child_of_its_launcher]
- A service ends with the status that it would have alone. [test_spawner: ends_with_its_own_status]
- Where the spawner ends before it has told of a service, that service ends. [test_spawner: nobody_was_told_of]
- What the spawner has not imported is started as a new program, and everything once it is gone.
  [test_spawner: as_a_new_program]
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

import structlog

from tidegate.json_text import parse_json
from tidegate.runtime.child import RESET_SIGNALS, die_with_parent, take_log
from tidegate.runtime.launch import until_readable
from tidegate.runtime.process_title import set_process_title
from tidegate.runtime.processes import Child, ChildByPid, ServiceSpec, started

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 128 * 1024
_ROOM_BYTES = 4096
_READY = b"ready"
_READY_S = 60.0
"""The imports take 2 s, and 10 s from a cold disk."""
_ANSWER_S = 10.0
"""Two forks take some 20 ms on a busy machine."""


class Spawner:
    """`begin` makes it, or `forked`. Use it on the thread that made it, and call `start` once `ready` has returned."""

    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[bytes] | ChildByPid, modules: frozenset[str]
    ) -> None:
        self._connection = connection
        self._process = process
        self._modules = modules
        self._is_ready = False
        self._log = structlog.get_logger("spawner")

    @classmethod
    def begin(cls, modules: Sequence[str], *, env: Mapping[str, str], log_path: Path) -> Self:
        """Starts the spawner of services' modules, which have a `main`. `env` is added to that of this
        process. OSError."""
        _become_subreaper()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = (str(other.fileno()), str(os.getpid()), ",".join(modules), "-" * _ROOM_BYTES)
        with other, open(log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidegate.runtime.spawner", *words],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                # The terminal's Ctrl-C is the launcher's affair.
                start_new_session=True,
            )
        return cls(own, process, frozenset(modules))

    @classmethod
    def forked(cls, modules: Sequence[str]) -> Self | None:
        """A spawner that is a fork of this process. None where it has not imported the modules, or has threads, which
        no fork has."""
        if not all(_is_imported(module) for module in modules) or _num_threads() != 1:
            return None
        _become_subreaper()
        launcher = os.getpid()
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                own.close()
                os.setsid()
                _belong_to(launcher)
                _serve(other, launcher)
                os._exit(0)
            finally:
                os._exit(1)
        other.close()
        return cls(own, ChildByPid(pid), frozenset(modules))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Returns once it has imported the modules, and at once after that. If it cannot, all services will be new
        programs."""
        if self._is_ready:
            return
        self._connection.setblocking(False)
        try:
            async with asyncio.timeout(_READY_S):
                await until_readable(self._connection.fileno())
            if self._connection.recv(64) != _READY:
                raise ConnectionResetError("it ended while it imported")
        except (OSError, TimeoutError) as error:
            self._given_up(error)
        self._connection.settimeout(_ANSWER_S)
        self._is_ready = True

    def start(self, spec: ServiceSpec) -> Child:
        """A fork of the spawner where the service is one that it has imported, else a new interpreter."""
        words = spec.command
        if words[:2] != (sys.executable, "-m") or words[2] not in self._modules:
            return started(spec)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        request = {"words": words, "log": str(spec.log_path), "env": dict(spec.env)}
        try:
            self._connection.send(json.dumps(request).encode())
            return ChildByPid(int(parse_json(self._connection.recv(64))))
        except (OSError, ValueError) as error:
            self._given_up(error)
            return self._told_late() or started(spec)

    def _given_up(self, error: Exception) -> None:
        """Without it a service takes a second more."""
        self._log.warning("spawner does not answer", error=str(error))
        self._modules = frozenset()
        self._process.kill()
        self._process.wait()

    def _told_late(self) -> Child | None:
        """What the spawner told just before it was killed. A service of which it did not tell ends."""
        with suppress(OSError, ValueError):
            self._connection.setblocking(False)
            return ChildByPid(int(parse_json(self._connection.recv(64))))
        return None

    def close(self) -> None:
        """Ends the spawner. The services stay."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def main(arguments: Sequence[str]) -> int:
    fd, launcher, modules, _ = arguments
    _belong_to(int(launcher))
    connection = socket.socket(fileno=int(fd))
    os.set_inheritable(connection.fileno(), False)
    for module in modules.split(","):
        _program(module)
    if (num_threads := _num_threads()) != 1:
        print(f"spawner: {num_threads} threads run after the imports; a fork would lose them", file=sys.stderr)
        return 1
    with suppress(ConnectionResetError):  # closed before it was read
        _serve(connection, int(launcher))
    return 0


def _belong_to(launcher: int) -> None:
    die_with_parent(launcher)
    set_process_title("\0".join((sys.executable, "-m", "tidegate.runtime.spawner")))


def _serve(connection: socket.socket, launcher: int) -> None:
    """The work of the spawner, until the launcher closes the connection."""
    for number in RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()
    connection.send(_READY)
    while request := connection.recv(_MAX_REQUEST_BYTES):
        told, tell = os.pipe()
        go, let_go = os.pipe()
        between = os.fork()
        if between == 0:
            own = os.getpid()
            service = os.fork()
            if service == 0:
                for fd in (told, tell, let_go):
                    os.close(fd)
                _become(request, connection, go, between=own, launcher=launcher)
            os.write(tell, b"%d" % service)
            os._exit(0)
        os.close(tell)
        os.waitpid(between, 0)
        connection.send(os.read(told, 32))
        os.write(let_go, b"1")
        for fd in (told, let_go, go):  # `go` as late: without a reader the write would end this process
            os.close(fd)


def _become_subreaper() -> None:
    """The kernel gives orphans below this process to it. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _is_imported(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and (not hasattr(found, "__path__") or f"{module}.__main__" in sys.modules)


def _program(module: str) -> Any:
    """What `python -m MODULE` runs: a package's `__main__`, or the module."""
    found = importlib.import_module(module)
    return importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found


def _become(request: bytes, connection: socket.socket, go: int, *, between: int, launcher: int) -> NoReturn:
    """The service, from here to its end. `go`: nothing comes where the launcher does not know of it."""
    status = 1
    try:
        connection.close()
        os.setsid()
        if not os.read(go, 1):
            os._exit(1)
        os.close(go)
        fields = parse_json(request)
        python, flag, module, *words = fields["words"]
        take_log(fields["log"])
        while os.getppid() == between:  # it ends within microseconds
            time.sleep(0)
        die_with_parent(launcher)  # which may be gone: then the kernel has given the service to another one
        set_process_title("\0".join((python, flag, module, *words)))
        os.environ.update(fields["env"])
        random.seed()
        sys.argv = [module, *words]
        status = _program(module).main() or 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 # the edge of the process: its log and its status show the cause
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = status or 1
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
