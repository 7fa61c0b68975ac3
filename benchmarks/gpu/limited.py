"""Runs a command as a process group of its own, for a limited time.

Invariants:
- At the limit, and after any other end, nothing of the command's group is left, nor what it started outside of its
  group. [test_gpu_runner: killed_by_its_limit_with_its_children] [test_gpu_runner: what_a_part_leaves]
- The command dies with this process. [test_gpu_runner: a_runner_that_is_killed]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tidegate.runtime import dies_with_parent

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Ended:
    """`status` is None where the limit came first, and negative for a signal."""

    status: int | None
    seconds: float


def run_limited(command: Sequence[str], *, limit_s: float, log: Path) -> Ended:
    """Run a command of absolute paths; its output goes to `log`. Call it from the main thread."""
    tied = [sys.executable, "-I", "-S", dies_with_parent.__file__, str(os.getpid()), *command]
    began = time.monotonic()
    with _orphans_end(), log.open("wb") as output:
        process = subprocess.Popen(
            tied, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        in_time = False
        try:
            in_time = _ends_within(process.pid, limit_s)
        finally:
            # The process is not reaped yet, so no other group can have its number.
            _kill_all(process.pid)
            status = process.wait()
    return Ended(status if in_time else None, time.monotonic() - began)


def _ends_within(pid: int, limit_s: float) -> bool:
    watch = os.pidfd_open(pid)
    try:
        return bool(select.select([watch], [], [], limit_s)[0])
    finally:
        os.close(watch)


def _kill_all(pid: int) -> None:
    # A launcher starts its services in sessions of their own.
    outside = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in outside:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def _orphans_end() -> Iterator[None]:
    """Meanwhile the orphans below this process are its children. It kills and reaps them at the end.

    A process that outlives the one that started it has no other tie to the command.
    """
    own = psutil.Process()
    before = frozenset(own.children())
    _adopt_orphans(True)
    try:
        yield
    finally:
        # Those whose parent dies here are children in the next turn.
        while orphans := [child for child in own.children() if child not in before]:
            for orphan in orphans:
                orphan.kill()
                orphan.wait()
        _adopt_orphans(False)


def _adopt_orphans(adopts: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
