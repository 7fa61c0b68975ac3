"""The files in the folder of shared memory: which member each belongs to, and which are left over.

Invariants:
- A file belongs to one member, in one mesh of one epoch. [test_arena_files: every_arena_has_its_own_name]
- Once the state is in an epoch and all have switched, nobody needs the files of earlier epochs.
  [test_arena_files: a_sweep_removes_only_earlier_epochs]
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tidegate.elastic.plan.layout import Mesh

_NAME = re.compile(r"epoch(\d+)-member\d+-\d+-[0-9a-f]+")


def arena_path(folder: Path, epoch: int, member: int, number: int, mesh: Mesh) -> Path:
    """`number` counts the arenas that the member has made in the epoch."""
    digest = hashlib.sha256(repr(mesh).encode()).hexdigest()[:12]
    return folder / f"epoch{epoch}-member{member}-{number}-{digest}"


def sweep(folder: Path, *, epoch: int) -> None:
    """Unlink the files of earlier epochs. Several members may do so at once."""
    for path in folder.iterdir():
        if (found := _NAME.fullmatch(path.name)) and int(found[1]) < epoch:
            path.unlink(missing_ok=True)
