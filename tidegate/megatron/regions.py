"""Which rows go from the shards that are held to the shard that is wanted. Pure integers, no tensor.

A plain mapping for readers of snapshots; it stands behind `MapsRegions`, where the elastic planner will take its place.
Invariants: every row of the target's pieces comes from exactly one source; sources that hold the same rows are used in
the order given; nothing is copied that is not wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.megatron.shards import Shard


class RegionsMissing(ValueError):
    """The sources do not hold all that the target wants; the message names the parameter and the rows."""


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """`size` indices along the parameter's dim, from `source_start` of source number `source` to `target_start`."""

    source: int
    source_start: int
    target_start: int
    size: int


class MapsRegions(Protocol):
    """Decides which source serves which rows."""

    def copies(self, sources: Sequence[Shard], target: Shard) -> tuple[RegionCopy, ...]:
        """Raises RegionsMissing where the sources leave a row of the target uncovered."""


class FirstHolder:
    """Takes each row from the first source that holds it."""

    def copies(self, sources: Sequence[Shard], target: Shard) -> tuple[RegionCopy, ...]:
        found: list[RegionCopy] = []
        for piece in target.pieces:
            row, end = piece.logical, piece.logical + piece.size
            while row < end:
                copy = _first_holding(sources, target, row=row, end=end, to=piece.local + row - piece.logical)
                found.append(copy)
                row += copy.size
        return tuple(found)


def _first_holding(sources: Sequence[Shard], target: Shard, *, row: int, end: int, to: int) -> RegionCopy:
    for index, source in enumerate(sources):
        if source.name != target.name:
            continue
        if (source.logical_shape, source.dim) != (target.logical_shape, target.dim):
            raise RegionsMissing(
                f"{target.name}: a source is cut from {source.logical_shape} along dim {source.dim}, the target from "
                f"{target.logical_shape} along dim {target.dim}; both must be of one model"
            )
        for piece in source.pieces:
            if piece.logical <= row < piece.logical + piece.size:
                size = min(end, piece.logical + piece.size) - row
                return RegionCopy(index, piece.local + row - piece.logical, to, size)
    raise RegionsMissing(
        f"{target.name}: no source holds index {row} of {target.logical_shape[target.dim]} along dim {target.dim} "
        f"({sum(source.name == target.name for source in sources)} sources hold a part of it)"
    )
