"""Locks that let only one launcher run a job, and one agent have a cluster: a file, whose record has the holder's pid
and a launcher's boot.

Invariant: the lock dies with its holder, so its record is true for a live launcher.
[test_claim: a_running_job_is]
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.job import JobFolder
from tidegate.json_text import parse_json, typed, whole_number
from tidegate.machines import boot_id

LOCK = "launcher.lock"
RECORD_BYTES = 128
"""Room for each record, so that a shorter one leaves nothing of a longer one."""


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
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock_record(fd)
    else:
        return None
    finally:
        os.close(fd)


@contextmanager
def held(path: Path, busy: Callable[[str], Exception]) -> Iterator[int]:
    """Makes the file where it is missing, and holds the lock within the block. Gives the descriptor for the record.

    Raises `busy` of the holder's pid where another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy(holder_of(fd)) from None
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
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


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
