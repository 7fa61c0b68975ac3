"""The transport within a host: each rank takes what it wants straight out of the other ranks' arenas.

Nothing is staged and nobody sends. A region becomes strips of memory; strips that follow each other at both ends become
one, as where tensors lie side by side in both arenas, and they are copied in order of their target addresses.
A rank that is gone needs no stand-in, since its file is still there.
Invariants: every strip lies in its tensor at both ends; other ranks' files are never written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from tidegate.elastic.carry.transport import NO_STAND_INS, StandIns, TransferFailed, tensor_of
from tidegate.elastic.model.memory import ArenaReader, Place, memory_at
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.plan import Part, RegionCopy

Places = Mapping[int, Mapping[TensorKey, Place]]
"""By rank: where its source tensors lie."""


class Strip(NamedTuple):
    """`rows` runs of `row_bytes` from one address to another; strides are between the beginnings of rows."""

    source: int
    target: int
    rows: int
    row_bytes: int
    source_stride: int
    target_stride: int


class SharedMemory:
    """`places` are those of all ranks that hold the source; ranks whose receives are never pulled may be left out."""

    def __init__(self, places: Places, reader: ArenaReader) -> None:
        self._places = places
        self._reader = reader

    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        self.pull(part.local, part.receives, sources, targets)

    def pull(
        self, local: Iterable[RegionCopy], receives: Iterable[RegionCopy], sources: Tensors, targets: Tensors
    ) -> None:
        receives = tuple(receives)
        wanted: defaultdict[int, set[TensorKey]] = defaultdict(set)
        for copy in receives:
            wanted[copy.source_rank].add((copy.name, copy.kind))
        held = {rank: self._tensors_of(rank, keys) for rank, keys in wanted.items()}
        strips = [_strip(copy, sources, targets) for copy in local]
        strips += [_strip(copy, held[copy.source_rank], targets) for copy in receives]
        alive = (sources, held, targets)
        for source, target, rows, row_bytes, source_stride, target_stride in merged(strips):
            shape = (rows, row_bytes)
            np.copyto(
                memory_at(target, shape, (target_stride, 1), owner=alive),
                memory_at(source, shape, (source_stride, 1), owner=alive),
            )

    def _tensors_of(self, rank: int, keys: AbstractSet[TensorKey]) -> Tensors:
        """Those of the keys that the rank has."""
        places = self._places[rank]
        try:
            return {key: self._reader.tensor_at(places[key]) for key in keys & places.keys()}
        except FileNotFoundError as error:
            raise TransferFailed(f"the arena of rank {rank} is gone: {error}") from error


def merged(strips: Iterable[Strip]) -> Iterator[Strip]:
    """In order of target addresses; strips that go on where another ends, at both ends, are one with it."""
    last: Strip | None = None
    for strip in sorted(map(_flattened, strips), key=lambda strip: strip.target):
        if last is not None and last.rows == strip.rows == 1 and _follows(strip, last):
            last = last._replace(row_bytes=last.row_bytes + strip.row_bytes)
            continue
        if last is not None:
            yield last
        last = strip
    if last is not None:
        yield last


def _follows(strip: Strip, last: Strip) -> bool:
    return (strip.source - last.row_bytes, strip.target - last.row_bytes) == (last.source, last.target)


def _flattened(strip: Strip) -> Strip:
    """As one row where rows follow each other without gaps."""
    if strip.rows == 1 or strip.source_stride == strip.target_stride == strip.row_bytes:
        size_bytes = strip.rows * strip.row_bytes
        return Strip(strip.source, strip.target, 1, size_bytes, size_bytes, size_bytes)
    return strip


def _strip(copy: RegionCopy, sources: Tensors, targets: Tensors) -> Strip:
    size = copy.itemsize
    return Strip(
        _address(sources, copy, copy.source_offset, copy.source_stride),
        _address(targets, copy, copy.target_offset, copy.target_stride),
        copy.rows,
        copy.cols * size,
        copy.source_stride * size,
        copy.target_stride * size,
    )


def _address(tensors: Tensors, copy: RegionCopy, offset: int, stride: int) -> int:
    tensor = tensor_of(tensors, copy, offset, stride)
    if tensor.device.type != "cpu":
        raise TransferFailed(
            f"{copy.name} {copy.kind} is on {tensor.device}, and shared memory is the host's: use peer to peer"
        )
    return tensor.data_ptr() + offset * copy.itemsize
