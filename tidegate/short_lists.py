"""Words for a person: the first few items of a long list and how many more there are, and counts of things."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def first_few(names: Iterable[str], *, most: int = 4) -> str:
    """The names in one line."""
    shown = list(names)
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest


def counted(number: int, thing: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def first_lines(faults: Sequence[str], *, most: int) -> str:
    """The faults, one in each line."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "\n".join([*faults[:most], *more])
