"""A folder replaced by another as a whole.

Invariant: whenever its writer is killed, the one or the other is there, under its name or, until `recover`, as the
former.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def partial_of(folder: Path) -> Path:
    """Where the new one is to be written, empty; beside the folder, so that it can be renamed."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def put_in_place(partial: Path, folder: Path) -> None:
    former = _former(folder)
    if folder.exists():
        shutil.rmtree(former, ignore_errors=True)
        os.rename(folder, former)
    os.rename(partial, folder)
    shutil.rmtree(former, ignore_errors=True)


def recover(folder: Path) -> None:
    """Bring the former one back where a kill came between the two renames."""
    former = _former(folder)
    if not folder.exists() and former.exists():
        os.rename(former, folder)


def _former(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.former")
