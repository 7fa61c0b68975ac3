"""The name of a checkpoint's folder, and which of two checkpoints is newer.

Invariant: a checkpoint of a later incarnation is newer, whatever its iteration, because the work of the earlier
incarnation was superseded. [test_checkpoint_names: later_incarnation_is_newer]
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_SET_ASIDE = ".damaged"
_NAME = re.compile(r"inc([0-9]{1,18})-it([0-9]{1,18})")


def checkpoint_name(incarnation: int, next_iteration: int) -> str:
    return f"inc{incarnation:03d}-it{next_iteration:06d}"


def place_of(name: str) -> tuple[int, int] | None:
    """(incarnation, next iteration), the sort key of checkpoints. None for any other name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def set_aside(folder: Path) -> None:
    """Give a damaged checkpoint another name: it is found no more, and stays for a person to look at."""
    with suppress(OSError):  # it is gone, or another of its name is set aside
        os.rename(folder, folder.with_name(f"{folder.name}{_SET_ASIDE}"))
