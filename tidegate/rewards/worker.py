"""The parent's side of one reward worker: starts its process, sends requests, kills it when an answer takes too long.

A worker gets one request at a time. A worker that did not finish an answer never gets another request.

Invariants:
- The worker dies with its parent, whatever ends the parent. [test_pool: dies_with_its_parent]
- Processes that its functions started in its process group die with it. [test_pool: child_processes_of_a_function_die]
- Its environment has no credential of Tidegate or W&B. [test_pool: no_credential_in_its_environment]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.json_text import parse_json
from tidegate.runtime import dies_with_parent
from tidegate.runtime.launch import until_readable

_READ_BYTES = 1 << 16
_NOT_PASSED_ON = ("TIDEGATE_", "WANDB_")
"""How names of variables begin that a function does not get: they are, or lead to, what lets somebody in."""
_STDERR = 2


@dataclass(frozen=True, slots=True)
class FunctionPath:
    """`module:function`, and a folder to import it from besides the installed packages."""

    path: str
    import_from: str


@dataclass(frozen=True, slots=True)
class Signature:
    """The argument names that a function requires."""

    required: tuple[str, ...]


class FunctionRaised(Exception):
    """The call failed. The worker can serve further calls. `traceback` is empty where the function raised nothing."""

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class WorkerLost(Exception):
    """The worker did not answer in time, or died. It cannot be used any more."""


class RewardWorker:
    """Create it on a thread that lives as long as the process: the kernel ties the worker to that thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        tie = (sys.executable, "-I", "-S", dies_with_parent.__file__, str(os.getpid()))
        with theirs:
            self._process = subprocess.Popen(
                [*tie, sys.executable, "-u", "-m", "tidegate.rewards.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Send a function's output to the log, not to the standard output of a command.
                stdout=_STDERR,
                # Fix the hash seed: sets of texts then have the same order in every process and run.
                env={**_environment(), "PYTHONPATH": _python_path(), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"},
                process_group=0,
            )
        self.signatures: tuple[Signature, ...] = ()
        ours.setblocking(False)
        self._socket = ours
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def load(self, functions: Sequence[FunctionPath], *, timeout_s: float) -> None:
        """Import the functions and set `signatures`. Raises ValueError when one cannot be used, or WorkerLost."""
        paths = [{"path": each.path, "import_from": each.import_from} for each in functions]
        answer = await self._ask({"functions": paths}, timeout_s=timeout_s)
        if "fault" in answer:
            raise ValueError(answer["fault"])
        self.signatures = tuple(Signature(tuple(each["required"])) for each in answer["ready"])

    async def call(self, function: int, arguments: Mapping[str, Any], *, timeout_s: float) -> float:
        """The value of a call. Raises FunctionRaised or WorkerLost."""
        answer = await self._ask({"function": function, "arguments": arguments}, timeout_s=timeout_s)
        if "error" in answer:
            raise FunctionRaised(str(answer["error"]), str(answer.get("traceback", "")))
        try:
            return float(answer["value"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WorkerLost(f"sent no valid answer ({type(error).__name__}: {error})") from error

    def strike(self) -> None:
        """Kill the worker with its process group. The pending call sees the end, and reaps the process."""
        # The process is not reaped before `kill` ends, so the number cannot name another group.
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the worker and wait for its end. Do not call it during a request. Idempotent."""
        if self._pidfd < 0:
            return
        self.strike()
        self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        self._socket.close()

    async def _ask(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        asking = asyncio.create_task(self._exchange(message))
        dying = asyncio.create_task(until_readable(self._pidfd))
        try:
            await asyncio.wait({asking, dying}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.exception() is None:
                return asking.result()
            if not asking.done() and not dying.done():
                raise WorkerLost(f"gave no result within {timeout_s:g} s")
            # It closed its end, sent no valid answer, or died.
            await asyncio.wait({dying}, timeout=timeout_s)
            raise WorkerLost(self._how_it_ended() if dying.done() else "closed its connection or broke it")
        finally:
            for task in (asking, dying):
                task.cancel()
            await asyncio.gather(asking, dying, return_exceptions=True)

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, json.dumps(message).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            received = await loop.sock_recv(self._socket, _READ_BYTES)
            if not received:
                raise ConnectionError("it closed its end")
            line += received
        answer = parse_json(line)
        if not isinstance(answer, dict):
            raise ConnectionError("it sent no valid answer")
        return answer

    def _how_it_ended(self) -> str:
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "a pidfd is readable once its process has ended"
        if ended.si_code == os.CLD_EXITED:
            return f"ended the process with status {ended.si_status}"
        return f"died of {signal.Signals(ended.si_status).name}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}


def _python_path() -> str:
    """The folders in which this process finds its modules. An empty entry means the current folder."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
