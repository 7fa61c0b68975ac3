"""What a checkpoint's folder is called, and which is newer.

Invariant: a later incarnation's is newer, whatever its iteration: an earlier one's work was superseded.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"inc(\d+)-it(\d+)")


def checkpoint_name(incarnation: int, next_iteration: int) -> str:
    return f"inc{incarnation:03d}-it{next_iteration:06d}"


def place_of(name: str) -> tuple[int, int] | None:
    """(incarnation, next iteration), by which checkpoints are ordered; None of what is no checkpoint's name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
