"""The lock that makes one launcher at a time run a job: a file in the job's folder, its record the holder's pid and
boot. Invariant: the lock dies with its holder, so that what it says of a live launcher is true."""

from __future__ import annotations

import fcntl
import json
import os

from tidegate.job import JobFolder

LOCK = "launcher.lock"


def launcher_pid(folder: JobFolder) -> str | None:
    """Of the launcher that runs the job now; None when none does."""
    try:
        fd = os.open(folder.root / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder_of(fd)
    else:
        return None
    finally:
        os.close(fd)


def holder_of(lock_fd: int) -> str:
    """The pid as the lock's record has it."""
    return str(lock_record(lock_fd).get("pid", "unknown"))


def lock_record(lock_fd: int) -> dict[str, int]:
    try:
        return dict(json.loads(os.pread(lock_fd, 1024, 0)))
    except ValueError:
        # New, or cut off by a kill: the clock still makes the next boot larger.
        return {}
