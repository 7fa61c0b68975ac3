"""A sum of a tensor's bits in which every logical element has a weight of its own, whatever layout holds it.

The element at (row, column) of the logical matrix counts as its bits, an unsigned integer, times
`rows(row) * blocks(column // BLOCK) * columns(column % BLOCK)`, three sequences of odd 64-bit numbers; all is taken
modulo 2**64. So the sums of boxes that tile a tensor add up to the tensor's, however it is cut; padding lies in no box
and does not count. Odd weights show every single changed bit; two elements that changed places go unseen with a
probability of less than 2**-32.
Invariant: memory beyond the tensor's is bounded by CHUNK elements, which leaves numpy's reduction in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.elastic.memory import memory_at
from tidegate.elastic.regions import Block

BLOCK = 4096
"""Columns that share a weight table: 32 KiB, the size of a core's first cache."""
CHUNK = 1 << 22
"""Elements that are brought to the host at once from another device."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Numbers = npt.NDArray[np.uint64]


class WeightedSums:
    """Keeps the weights of a block's columns."""

    def __init__(self) -> None:
        self._columns = _odd_numbers(0, BLOCK, sequence=1)

    def of(self, tensor: torch.Tensor, blocks: Iterable[Block]) -> int:
        """Of the blocks of a flat tensor of any dtype and device."""
        bits = tensor.detach().view(_INTEGERS[tensor.itemsize])
        return sum(self._of_block(bits, block) for block in blocks) % 2**64

    def _of_block(self, bits: torch.Tensor, block: Block) -> int:
        total = 0
        for first, low, num, width in _spans(block.col, block.cols):
            weights = self._columns[low : low + width]
            begin = block.offset + first * BLOCK + low - block.col
            for row, rows, at, count in _chunks(block.rows, num, width):
                offset = begin + row * block.stride + at * BLOCK
                found = _on_host(bits, (rows, count, width), (block.stride, BLOCK, 1), offset)
                sums = np.einsum("rbc,c->rb", found, weights)
                sums *= _odd_numbers(block.row + row, rows, sequence=2)[:, None]
                sums *= _odd_numbers(first + at, count, sequence=3)
                total += int(sums.sum())
        return total


def _on_host(
    bits: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> npt.NDArray[np.unsignedinteger[Any]]:
    region = bits.as_strided(shape, strides, bits.storage_offset() + offset)
    # By its address, since `Tensor.numpy` forbids the storage to be resized from then on; the last stride is 1.
    host = region if region.device.type == "cpu" else region.cpu()
    byte_strides = (*(stride * bits.itemsize for stride in host.stride()[:-1]), 1)
    seen = memory_at(host.data_ptr(), (*shape[:-1], shape[-1] * bits.itemsize), byte_strides, owner=host)
    return seen.view(f"u{bits.itemsize}")


def _spans(col: int, cols: int) -> Iterator[tuple[int, int, int, int]]:
    """Columns as (first block, first column in it, blocks, columns of each): a cut block, whole ones, a cut block."""
    block, low = divmod(col, BLOCK)
    if low:
        width = min(BLOCK - low, cols)
        yield block, low, 1, width
        block, cols = block + 1, cols - width
    num, rest = divmod(cols, BLOCK)
    if num:
        yield block, 0, num, BLOCK
    if rest:
        yield block + num, 0, 1, rest


def _chunks(rows: int, num: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, rows, block, blocks) of at most CHUNK elements."""
    blocks = min(num, CHUNK // BLOCK)
    step = max(CHUNK // (blocks * width), 1)
    for row in range(0, rows, step):
        for at in range(0, num, blocks):
            yield row, min(step, rows - row), at, min(blocks, num - at)


def _odd_numbers(first: int, count: int, *, sequence: int) -> Numbers:
    """Elements `first` and on of a sequence: splitmix64 (Steele, Lea, Flood 2014), made odd."""
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) + np.uint64(sequence << 56)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed | np.uint64(1)
