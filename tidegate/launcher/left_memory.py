"""Folders of jobs in this machine's host memory that killed processes have left.

A launcher removes its job's folder at its end, and makes it anew at its start. One that was killed leaves it, with
versions of the weights. Nobody reads them again. The next launcher of the job here removes it, and agents do.

Invariants:
- A folder whose launcher lives, or may just begin, is not taken for left. [test_left_memory: whose_launcher_lives]
- Where a removal is cut off, the next one ends it. [test_left_memory: that_was_cut_off]
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tidegate.launcher.lock import LOCK, held_by

_BEGINS_WITHIN_S = 10.0
"""A launcher makes its lock's file and takes the lock at once after that."""


def own_name() -> str:
    """What the names of this user's folders begin with."""
    return f"tidegate-{os.getuid()}-"


def left_by_launchers(root: Path) -> Iterator[Path]:
    """Those of this user in a folder of host memory, also where another one may begin in this moment."""
    now_s = time.time()
    for folder in folders_in(root):
        with suppress(OSError):
            age_s = now_s - (folder / LOCK).lstat().st_mtime
            if age_s > _BEGINS_WITHIN_S and is_left_by_launcher(folder):
                yield folder


def folders_in(root: Path) -> Iterator[Path]:
    """This user's, of jobs."""
    for path in root.glob(f"{own_name()}*"):
        with suppress(OSError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():  # anybody may take the name
                yield path


def is_left_by_launcher(folder: Path) -> bool:
    """Where no launcher begins in this moment. False also for the folder of an agent, which has no launcher's lock."""
    lock = folder / LOCK
    return lock.is_file() and held_by(lock) is None


def taken_bytes(folder: Path) -> int:
    """The bytes of all files in it. Some may go meanwhile."""
    taken = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                taken += os.lstat(os.path.join(place, name)).st_blocks * 512
    return taken


class Removals:
    """What is being removed. That takes seconds where it is large."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def begin(self, folder: Path) -> None:
        """It is gone for others at once."""
        aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
        with suppress(OSError):
            folder.rename(aside)
            self._start(aside)

    def go_on(self, root: Path) -> None:
        """With what a process that was killed meanwhile had begun to remove."""
        for left in root.glob(f".{own_name()}*"):
            self._start(left)

    def finish(self) -> None:
        """Until all of it is gone from memory."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start(self, folder: Path) -> None:
        removal = threading.Thread(target=shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True})
        removal.start()
        self._threads = {each for each in self._threads if each.is_alive()} | {removal}
