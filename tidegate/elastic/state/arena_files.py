"""The files in the folder of shared memory: whose they are, and which are left over.

Invariant: a file is one member's, in one mesh of one epoch; once the state is in an epoch and all have switched, those
of earlier epochs are of no use, whoever made them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tidegate.elastic.plan.layout import Mesh

_NAME = re.compile(r"epoch(\d+)-member\d+-\d+-[0-9a-f]+")


def arena_path(folder: Path, epoch: int, member: int, number: int, mesh: Mesh) -> Path:
    """`number`: how many arenas the member has made in the epoch."""
    digest = hashlib.sha256(repr(mesh).encode()).hexdigest()[:12]
    return folder / f"epoch{epoch}-member{member}-{number}-{digest}"


def sweep(folder: Path, *, epoch: int) -> None:
    """Unlink what earlier epochs left; several members may at once."""
    for path in folder.iterdir():
        if (found := _NAME.fullmatch(path.name)) and int(found[1]) < epoch:
            path.unlink(missing_ok=True)
