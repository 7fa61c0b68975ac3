"""Replaces a folder by another one as a whole.

Invariant: whenever the writer is killed, the old or the new folder is whole. It has its own name or, until `recover`,
the former folder's name. [test_folder_swap: kill_between_the_renames]
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def empty_partial(folder: Path) -> Path:
    """An empty folder to write the new content into. It stands beside `folder`, so that a rename can move it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def swap_in(partial: Path, folder: Path) -> None:
    former = _former(folder)
    if folder.exists():
        shutil.rmtree(former, ignore_errors=True)
        os.rename(folder, former)
    os.rename(partial, folder)
    shutil.rmtree(former, ignore_errors=True)


def recover(folder: Path) -> None:
    """Brings the former folder back when a kill came between the two renames."""
    former = _former(folder)
    if not folder.exists() and former.exists():
        os.rename(former, folder)


def _former(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.former")
