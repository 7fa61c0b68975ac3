"""Folders on small file systems of their own, which can be full. They lie in memory (tmpfs); only root can mount them.

A file system is full once its size is set to what it holds, one page at least: no size would be no limit. Then a file
that needs a further page fails with ENOSPC, and so does a page of a mapped file, whose process gets SIGBUS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOMY = "4g"
"""Memory is taken for what is written alone."""
_TRIES = 20


@contextmanager
def mounted(folders: Iterable[Path]) -> Iterator[None]:
    """Mounts a file system on each folder that this process may mount one on. What was written stays in plain folders.

    An outer folder is mounted before those in it.
    """
    done: list[Path] = []
    try:
        for folder in sorted(set(folders)):
            folder.mkdir(parents=True, exist_ok=True)
            if _mount("-t", "tmpfs", "-o", f"size={_ROOMY}", "tmpfs", str(folder)):
                done.append(folder)
        yield
    finally:
        for folder in reversed(done):
            kept = folder.with_name(f"{folder.name}.kept")
            shutil.copytree(folder, kept, symlinks=True)
            subprocess.run(["umount", "--lazy", folder], check=True)
            folder.rmdir()
            kept.rename(folder)


def fill(folder: Path) -> int:
    """Sets the size of a mounted folder to what it holds, in bytes. RuntimeError where it grows all the time."""
    for _ in range(_TRIES):
        found = os.statvfs(folder)
        used = max(found.f_blocks - found.f_bfree, 1) * found.f_bsize
        if _remount(folder, str(used)):
            return used
    raise RuntimeError(f"{folder} grows faster than it can be made full")


def make_room(folder: Path) -> None:
    if not _remount(folder, _ROOMY):
        raise RuntimeError(f"{folder} gets no more room")


def _remount(folder: Path, size: str) -> bool:
    return _mount("-o", f"remount,size={size}", str(folder))


def _mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], check=False, capture_output=True).returncode == 0
