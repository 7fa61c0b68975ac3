"""Folders of jobs in this machine's host memory that killed processes have left.

A launcher removes its job's folder at its end, and makes it anew at its start. One that was killed leaves it, with
versions of the weights, until the job starts here again. A job that goes on elsewhere, waits or is cancelled does not.

Invariant: a folder whose launcher lives is not taken for left. [test_left_memory: whose_launcher_lives]
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tidegate.launcher.lock import LOCK, held_by


def left_by_launchers(root: Path) -> Iterator[Path]:
    """Those of this user in a folder of host memory."""
    return filter(is_left_by_launcher, folders_in(root))


def folders_in(root: Path) -> Iterator[Path]:
    """This user's, of jobs."""
    for path in root.glob(f"tidegate-{os.getuid()}-*"):
        with suppress(OSError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():  # anybody may take the name
                yield path


def is_left_by_launcher(folder: Path) -> bool:
    """False also for the folder of an agent, which has no launcher's lock."""
    lock = folder / LOCK
    return lock.is_file() and held_by(lock) is None


def taken_bytes(folder: Path) -> int:
    taken = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            taken += path.lstat().st_blocks * 512
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
        for left in root.glob(f".tidegate-{os.getuid()}-*"):
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
