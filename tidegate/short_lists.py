"""Shortens long lists for a person: the first few items, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def first_few(names: Iterable[str], *, most: int = 4) -> str:
    """The names in one line."""
    shown = list(names)
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest


def first_lines(faults: Sequence[str], *, most: int) -> str:
    """The faults, one in each line."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "\n".join([*faults[:most], *more])
