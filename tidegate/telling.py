"""Long lists as a person is told them: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def some(names: Iterable[str], *, most: int = 4) -> str:
    """In one line."""
    shown = list(names)
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest


def some_lines(faults: Sequence[str], *, most: int) -> str:
    """A line each."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "\n".join([*faults[:most], *more])
