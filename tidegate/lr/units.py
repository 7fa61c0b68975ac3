"""Sets of units (visits of one sample in one epoch, as ints), stored as sorted runs of consecutive ints.

The size of a set is that of its runs: a set of two spans of 10^12 units is two pairs of numbers, in memory and in a
checkpoint. A set is a value.

Invariant: runs are sorted, disjoint, not adjacent and not empty. [test_lr_units: runs_are_sorted_disjoint_and_merged]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tidegate.lr.errors import DuplicateUnit, OverConsumption, UnknownUnit

Run: TypeAlias = tuple[int, int]
"""The units from the first number up to the second, the second excluded."""


@dataclass(frozen=True, slots=True)
class Units:
    """A set of units. `Units.of` makes one."""

    runs: tuple[Run, ...] = ()

    @classmethod
    def of(cls, *parts: Units | Iterable[int]) -> Units:
        """The union of the parts, such as the units of each rank.

        DuplicateUnit: a unit occurs twice. UnknownUnit: a value is no unit.
        """
        return cls(_merged(sorted(run for part in parts for run in _runs(part))))

    @property
    def count(self) -> int:
        """The number of units. `len` would be limited to a C integer."""
        return sum(stop - first for first, stop in self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[int]:
        for first, stop in self.runs:
            yield from range(first, stop)

    def __or__(self, other: Units) -> Units:
        """The union. DuplicateUnit: both sets have a common unit."""
        return Units.of(self, other)

    def __and__(self, other: Units) -> Units:
        both, mine, others = [], 0, 0
        while mine < len(self.runs) and others < len(other.runs):
            (first, stop), (a, b) = self.runs[mine], other.runs[others]
            if max(first, a) < min(stop, b):
                both.append((max(first, a), min(stop, b)))
            if stop <= b:
                mine += 1
            else:
                others += 1
        return Units(tuple(both))

    def __sub__(self, other: Units) -> Units:
        if not self:
            return self
        edges = [self.runs[0][0], *(edge for run in other.runs for edge in run), self.runs[-1][1]]
        return self & Units(tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b))

    def first(self, count: int) -> Units:
        """The `count` lowest units. OverConsumption: the set has fewer."""
        if count > self.count:
            raise OverConsumption(f"{count} units are requested and only {self.count} are pending; take fewer")
        taken: list[Run] = []
        for first, stop in self.runs:
            if count <= 0:
                break
            taken.append((first, min(stop, first + count)))
            count -= stop - first
        return Units(tuple(taken))


def _runs(part: Units | Iterable[int]) -> Iterable[Run]:
    if isinstance(part, Units):
        return part.runs
    if isinstance(part, range) and part.step == 1:
        return [(part.start, part.stop)] if part else []
    return [(_checked(unit), unit + 1) for unit in part]


def _checked(unit: int) -> int:
    if isinstance(unit, bool) or not isinstance(unit, int):
        raise UnknownUnit(f"{unit!r} is no unit: units are ints from 0")
    return unit


def _merged(runs: list[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for first, stop in runs:
        if merged and first < merged[-1][1]:
            raise DuplicateUnit(f"unit {first} occurs twice; one update on one rank consumes a unit")
        if merged and first == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((first, stop))
    return tuple(merged)
