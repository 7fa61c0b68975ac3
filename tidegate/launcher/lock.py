"""Locks that let only one launcher run a job, and one agent have a cluster: a file, whose record has the holder's pid
and a launcher's boot.

Invariants:
- The lock dies with its holder, so its record is true for a live launcher. [test_claim: a_running_job_is]
- Who only looks whether it is held refuses nobody. [test_lock: looks_at_it_all_the_time]
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.job import JobFolder
from tidegate.json_text import parse_json, typed, whole_number
from tidegate.machines import boot_id

LOCK = "launcher.lock"
RECORD_BYTES = 128
"""Room for each record, so that a shorter one leaves nothing of a longer one."""


_LOOKS_S = 1.0
"""A look takes microseconds, and on NFS some messages. No event tells of its end."""
_TRY_AGAIN_S = 0.001


def machine_number() -> int:
    """A number of this machine and its boot: a pid means something there alone."""
    return int(boot_id().replace("-", "")[:12], 16)


def launcher_pid(folder: JobFolder) -> str | None:
    """The pid of the launcher that runs the job now. None when there is none."""
    return held_by(folder.root / LOCK)


def runs_elsewhere(folder: JobFolder) -> bool:
    """Whether a launcher on another machine runs the job."""
    record = record_of_holder(folder.root / LOCK) or {}
    return record.get("machine", machine_number()) != machine_number()


def lives_here(record: dict[str, int]) -> bool:
    """Whether the holder of a lock on shared storage is a process of this machine that lives. The record of another
    machine may be older than its hold."""
    return record.get("machine") == machine_number() and "pid" in record and Path(f"/proc/{record['pid']}").exists()


def held_by(path: Path) -> str | None:
    """The pid of the lock's holder, "unknown" where its record says none. None when nobody holds it."""
    record = record_of_holder(path)
    return None if record is None else _pid_in(record)


def record_of_holder(path: Path) -> dict[str, int] | None:
    """None when nobody holds the lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if _locked(fd, fcntl.LOCK_SH) else lock_record(fd)
    finally:
        os.close(fd)


@contextmanager
def held(path: Path, busy: Callable[[str], Exception]) -> Iterator[int]:
    """Makes the file where it is missing, and holds the lock within the block. Gives the descriptor for the record.

    Raises `busy` of the holder's pid where another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _taken(fd):
            raise busy(holder_of(fd))
        yield fd
    finally:
        os.close(fd)


@contextmanager
def job_lock(path: Path) -> Iterator[bool]:
    """Holds the lock within the block, so that no launcher begins. False where a launcher runs, and then holds nothing.

    OSError where there is no such file: the folder has never had a launcher.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _taken(fd)
    finally:
        os.close(fd)


def _taken(fd: int) -> bool:
    """Takes the lock, after those who look at it. False where another process has it."""
    deadline_s = time.monotonic() + _LOOKS_S
    while not _locked(fd, fcntl.LOCK_EX):
        if not _locked(fd, fcntl.LOCK_SH):
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_TRY_AGAIN_S)
    return True


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder_of(lock_fd: int) -> str:
    """The pid in the lock's record."""
    return _pid_in(lock_record(lock_fd))


def _pid_in(record: dict[str, int]) -> str:
    return str(record.get("pid", "unknown"))


def lock_record(lock_fd: int) -> dict[str, int]:
    try:
        record = typed(dict, parse_json(os.pread(lock_fd, 1024, 0)), LOCK)
        return {name: whole_number(value, name) for name, value in record.items()}
    except ValueError:
        # The record is new, or a kill cut it off. The clock still makes the next boot larger.
        return {}
