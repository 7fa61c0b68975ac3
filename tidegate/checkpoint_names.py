"""The name of a checkpoint's folder, and which of two checkpoints is newer.

Invariant: a checkpoint of a later incarnation is newer, whatever its iteration, because the work of the earlier
incarnation was superseded. [test_checkpoint_names: later_incarnation_is_newer]
"""

from __future__ import annotations

import re

_NAME = re.compile(r"inc(\d+)-it(\d+)")


def checkpoint_name(incarnation: int, next_iteration: int) -> str:
    return f"inc{incarnation:03d}-it{next_iteration:06d}"


def place_of(name: str) -> tuple[int, int] | None:
    """(incarnation, next iteration), the sort key of checkpoints. None for any other name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
