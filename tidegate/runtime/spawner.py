"""Starts services as forks of a process that has imported them, in place of new interpreters.

A service imports for a second of a core before it does anything, and a job has seven of them. The spawner is forked
from the launcher, before that has threads. For each service it forks twice, and the first fork ends at once. So the
kernel gives the service to its nearest subreaper, which the launcher has made itself: the launcher is the service's
parent, as if it had started it.

    launcher -> spawner -> (ended) -> service        launcher -> service

Invariants:
- The launcher is the parent of a service, which leads a session of its own and dies with the launcher.
  [test_spawner: is_a_child_of_its_launcher]
- A service has none of the spawner's descriptors. [test_spawner: is_a_child_of_its_launcher]
- A service ends with the status that it would have alone. [test_spawner: ends_with_its_own_status]
- What the spawner has not imported is started as a new program, and everything once it is gone.
  [test_spawner: as_a_new_program]
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn, Self

import structlog

from tidegate.json_text import parse_json
from tidegate.runtime.child import RESET_SIGNALS, die_with_parent, take_log
from tidegate.runtime.process_title import set_process_title
from tidegate.runtime.processes import Child, ServiceSpec, started

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 128 * 1024
_ANSWER_S = 10.0
"""Two forks take some 20 ms on a busy machine."""


class Forked:
    """A child of this process that it did not start itself."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """The exit status, negative for a signal. The child must be dead, or this waits for it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class Spawner:
    """`begin` makes it. Use it on the thread that made it."""

    def __init__(self, connection: socket.socket, pid: int, modules: frozenset[str]) -> None:
        self._connection = connection
        self._pid = pid
        self._modules = modules
        self._log = structlog.get_logger("spawner")

    @classmethod
    def begin(cls, modules: Sequence[str]) -> Self | None:
        """Imports the services' modules, which have a `main`, and forks the spawner.

        None where this process has several threads: a fork would lose them and keep their locks."""
        for module in modules:
            importlib.import_module(f"{module}.__main__")
        if len(os.listdir("/proc/self/task")) != 1:
            return None
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            return None
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            own.close()
            _serve(other, launcher)
        other.close()
        own.settimeout(_ANSWER_S)
        return cls(own, pid, frozenset(modules))

    def start(self, spec: ServiceSpec) -> Child:
        """A fork of the spawner where the service is one that it has imported, else a new interpreter."""
        words = spec.command
        if words[:2] != (sys.executable, "-m") or words[2] not in self._modules:
            return started(spec)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        request = {"words": words[2:], "log": str(spec.log_path), "env": dict(spec.env)}
        try:
            self._connection.send(json.dumps(request).encode())
            return Forked(int(parse_json(self._connection.recv(64))))
        except (OSError, ValueError) as error:
            # It is gone, or hangs: without it a service takes a second more.
            self._log.warning("spawner does not answer", error=str(error))
            self._modules = frozenset()
            return started(spec)

    def close(self) -> None:
        """Ends the spawner. The services stay."""
        self._connection.close()
        os.waitpid(self._pid, 0)


def _serve(connection: socket.socket, launcher: int) -> NoReturn:
    """The spawner: forks a service for each request, until the launcher has closed the connection."""
    status = 1
    try:
        die_with_parent(launcher)
        for number in RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # The terminal's Ctrl-C is the launcher's affair.
        os.setsid()
        gc.freeze()
        while request := connection.recv(_MAX_REQUEST_BYTES):
            told, tell = os.pipe()
            between = os.fork()
            if between == 0:
                service = os.fork()
                if service == 0:
                    _become(request, connection, (told, tell), launcher)
                os.write(tell, b"%d" % service)
                os._exit(0)
            os.close(tell)
            os.waitpid(between, 0)
            connection.send(os.read(told, 32))
            os.close(told)
        status = 0
    except BaseException:  # noqa: BLE001 # the edge of the process
        traceback.print_exc()
    finally:
        # Never return into the launcher's code, whatever was raised.
        os._exit(status)


def _become(request: bytes, connection: socket.socket, pipe: tuple[int, int], launcher: int) -> NoReturn:
    """The service, from here to its end."""
    status = 1
    try:
        connection.close()
        for fd in pipe:
            os.close(fd)
        os.setsid()
        fields = parse_json(request)
        module, *words = fields["words"]
        take_log(fields["log"])
        while os.getppid() != launcher:  # until the fork in between has ended: the kernel does it within microseconds
            time.sleep(0)
        die_with_parent(launcher)
        set_process_title(" ".join(("python", "-m", module, *words)))
        os.environ.update(fields["env"])
        random.seed()
        sys.argv = [module, *words]
        status = sys.modules[f"{module}.__main__"].main() or 0
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
