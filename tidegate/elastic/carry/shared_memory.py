"""The transport within a host: each rank copies its regions straight out of the other ranks' arenas.

- Nothing is staged, and no rank sends. A dead rank needs no stand-in, because its file is still there.
- A region is copied as strips of memory, in order of their target addresses.
- Strips that follow each other at both ends become one strip: tensors often lie side by side in both arenas.
- To a device, as a suspended job continues there, each region goes by itself.

Invariants:
- Every strip lies in its tensor at both ends. [test_shared_memory: a_region_outside_its_tensor_is_refused]
- Other ranks' files are never written. [test_memory: sees_writes_and_cannot_write]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from tidegate.elastic.carry.transport import NO_STAND_INS, StandIns, TransferFailed, copy_regions, tensor_of
from tidegate.elastic.model.memory import ArenaReader, Place, memory_at
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.plan import Part, RegionCopy

Places = Mapping[int, Mapping[TensorKey, Place]]
"""By rank: where its source tensors lie."""


class Strip(NamedTuple):
    """`rows` runs of `row_bytes` from one address to another. Strides go from the beginning of one row to the next."""

    source: int
    target: int
    rows: int
    row_bytes: int
    source_stride: int
    target_stride: int


class SharedMemory:
    """`places` has all ranks that hold the source. A rank may be missing if nothing is pulled from it."""

    def __init__(self, places: Places, reader: ArenaReader) -> None:
        self._places = places
        self._reader = reader

    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        self.pull(part.local, part.receives, sources, targets)

    def pull(
        self, local: Iterable[RegionCopy], receives: Iterable[RegionCopy], sources: Tensors, targets: Tensors
    ) -> None:
        receives = tuple(receives)
        keys_by_rank: defaultdict[int, set[TensorKey]] = defaultdict(set)
        for copy in receives:
            keys_by_rank[copy.source_rank].add((copy.name, copy.kind))
        others = {rank: self._tensors_of(rank, keys) for rank, keys in keys_by_rank.items()}
        if any(tensor.device.type != "cpu" for tensor in targets.values()):
            copy_regions(local, sources, targets)
            for copy in receives:
                copy_regions((copy,), others[copy.source_rank], targets)
            return
        strips = [_strip(copy, sources, targets) for copy in local]
        strips += [_strip(copy, others[copy.source_rank], targets) for copy in receives]
        alive = (sources, others, targets)
        for source, target, rows, row_bytes, source_stride, target_stride in merged(strips):
            shape = (rows, row_bytes)
            np.copyto(
                memory_at(target, shape, (target_stride, 1), owner=alive),
                memory_at(source, shape, (source_stride, 1), owner=alive),
            )

    def _tensors_of(self, rank: int, keys: AbstractSet[TensorKey]) -> Tensors:
        """The tensors of those keys that the rank has."""
        places = self._places[rank]
        try:
            return {key: self._reader.tensor_at(places[key]) for key in keys & places.keys()}
        except FileNotFoundError as error:
            raise TransferFailed(f"the arena file of rank {rank} does not exist: {error}") from error


def merged(strips: Iterable[Strip]) -> Iterator[Strip]:
    """The strips in order of target addresses. Strips that continue each other at both ends are joined."""
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
    """The strip as one row where its rows follow each other without gaps."""
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
            f"{copy.name} {copy.kind} is on {tensor.device}, and shared memory is in host memory: use peer to peer"
        )
    return tensor.data_ptr() + offset * copy.itemsize
