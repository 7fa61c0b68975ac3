"""One reward worker as its parent holds it: started, asked, killed when it does not answer in time.

Invariants: it dies with its parent, whatever ends that; what its functions started in its process group dies with it;
it is asked one thing at a time, and one that was left in the middle of an answer is never asked again.
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

from tidegate.runtime import dies_with_parent
from tidegate.runtime.launch import until_readable

_READ_BYTES = 1 << 16
_STDERR = 2


@dataclass(frozen=True, slots=True)
class FunctionPath:
    """`module:function`, and the folder it is imported from besides what is installed."""

    path: str
    import_from: str


@dataclass(frozen=True, slots=True)
class Signature:
    """Names that a function must be given."""

    required: tuple[str, ...]


class FunctionRaised(Exception):
    """The call failed; the worker can be asked again."""


class WorkerLost(Exception):
    """The worker did not answer: its time was up, or it died. It is of no use any more."""


class RewardWorker:
    """Start it on a thread that lives as long as the process: the kernel ties it to that."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        tie = (sys.executable, "-I", "-S", dies_with_parent.__file__, str(os.getpid()))
        with theirs:
            self._process = subprocess.Popen(
                [*tie, sys.executable, "-u", "-m", "tidegate.rewards.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # What a function prints is for the log at once, and not among what a command answers.
                stdout=_STDERR,
                # Sets of texts have one order then, in every process and every run.
                env={**os.environ, "PYTHONPATH": _python_path(), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"},
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
        """Sets `signatures`. ValueError when one cannot be used; WorkerLost."""
        wanted = [{"path": each.path, "import_from": each.import_from} for each in functions]
        answer = await self._ask({"functions": wanted}, timeout_s=timeout_s)
        if "fault" in answer:
            raise ValueError(answer["fault"])
        self.signatures = tuple(Signature(tuple(each["required"])) for each in answer["ready"])

    async def call(self, function: int, arguments: Mapping[str, Any], *, timeout_s: float) -> float:
        """FunctionRaised, or WorkerLost."""
        answer = await self._ask({"function": function, "arguments": arguments}, timeout_s=timeout_s)
        if "error" in answer:
            raise FunctionRaised(answer["error"])
        return float(answer["value"])

    def strike(self) -> None:
        """Kill it with all of its group; who asked it hears of its end, and reaps it."""
        # Unreaped until `kill` is through, so that the number names this group and no other.
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Returns when it is gone; not while it is asked. Idempotent."""
        if self._pidfd < 0:
            return
        self.strike()
        self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        self._socket.close()

    async def _ask(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        asking = asyncio.create_task(self._exchanged(message))
        dying = asyncio.create_task(until_readable(self._pidfd))
        try:
            await asyncio.wait({asking, dying}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.exception() is None:
                return asking.result()
            if not asking.done() and not dying.done():
                raise WorkerLost(f"gave no result within {timeout_s:g} s")
            # It closed its end, sent what is no answer, or is gone.
            await asyncio.wait({dying}, timeout=timeout_s)
            raise WorkerLost(self._how_it_ended() if dying.done() else "closed its connection or broke it")
        finally:
            for task in (asking, dying):
                task.cancel()
            await asyncio.gather(asking, dying, return_exceptions=True)

    async def _exchanged(self, message: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, json.dumps(message).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            received = await loop.sock_recv(self._socket, _READ_BYTES)
            if not received:
                raise ConnectionError("it closed its end")
            line += received
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ConnectionError("it sent what is no answer")
        return answer

    def _how_it_ended(self) -> str:
        found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        assert found is not None, "a pidfd is readable once its process has ended"
        if found.si_code == os.CLD_EXITED:
            return f"ended the process with status {found.si_status}"
        return f"died of {signal.Signals(found.si_status).name}"


def _python_path() -> str:
    """Where this process finds its modules; an empty entry means the folder it is in."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
