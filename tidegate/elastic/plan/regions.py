"""Boxes of a logical matrix and where they lie in flat storage. Integers only.

A block is a box of the logical matrix, (row, col) and (rows, cols), stored row by row. Element (r, c) of the matrix is
at

    offset + (r - row) * stride + (c - col)

Each piece of a shard is one block. A flat range of a shard is at most three blocks per piece: the rest of its first
row, whole rows, the beginning of its last row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tidegate.elastic.plan.parameters import Shard


class Block(NamedTuple):
    row: int
    col: int
    rows: int
    cols: int
    offset: int
    stride: int

    @property
    def num_elements(self) -> int:
        return self.rows * self.cols


class Overlap(NamedTuple):
    """A box that two holders have, and where each of them has it."""

    row: int
    col: int
    rows: int
    cols: int
    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int


def blocks_of(shard: Shard, start: int, end: int) -> tuple[Block, ...]:
    """The logical boxes of elements `start` to `end` of a shard. Offsets count from the shard's first element."""
    blocks: list[Block] = []
    for row, rows, low, high in _bands(start, end, shard.width):
        for piece in shard.pieces:
            first, last = max(low, piece.local), min(high, piece.local + piece.size)
            if first < last:
                logical = piece.logical + first - piece.local
                blocks.append(Block(row, logical, rows, last - first, row * shard.width + first, shard.width))
    return tuple(blocks)


def _bands(start: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, rows, first column, last column) of a flat range."""
    first, low = divmod(start, width)
    last, high = divmod(end, width)
    if first == last:
        if low < high:
            yield first, 1, low, high
        return
    if low:
        yield first, 1, low, width
        first += 1
    if first < last:
        yield first, last - first, 0, width
    if high:
        yield last, 1, 0, high


def overlaps_of(sources: Iterable[Block], targets: Iterable[Block]) -> tuple[Overlap, ...]:
    """The common boxes of two holders."""
    found: list[Overlap] = []
    targets = tuple(targets)
    for source in sources:
        for target in targets:
            row, col = max(source.row, target.row), max(source.col, target.col)
            rows = min(source.row + source.rows, target.row + target.rows) - row
            cols = min(source.col + source.cols, target.col + target.cols) - col
            if rows > 0 and cols > 0:
                at_source = source.offset + (row - source.row) * source.stride + col - source.col
                at_target = target.offset + (row - target.row) * target.stride + col - target.col
                found.append(Overlap(row, col, rows, cols, at_source, source.stride, at_target, target.stride))
    return tuple(found)


def first_clash(boxes: Iterable[tuple[int, int, int, int]]) -> tuple[int, int] | None:
    """An element (row, column) that lies in two of the (row, column, rows, columns), else None."""
    active: list[tuple[int, int, int]] = []
    for row, col, rows, cols in sorted(boxes):
        active = [box for box in active if box[0] > row]
        for _, low, high in active:
            if low < col + cols and col < high:
                return row, max(low, col)
        active.append((row + rows, col, col + cols))
    return None
