"""A sum of a tensor's bits in which every logical element has its own weight, whatever layout holds it.

A row of the logical matrix is a sequence of 64-bit words, with its elements from the low bits up.

    sum = sum over (row, word) of value * rows(row) * blocks(column // BLOCK) * words(word)   modulo 2**64

- `value`: the word as an integer. One element alone counts as it does within its word.
- `rows`, `blocks`, `words`: three sequences of odd 64-bit numbers. `words` starts anew for each BLOCK columns.

Boxes that tile a tensor have sums that add up to the tensor's sum, however it is cut. Padding is in no box and does not
count.

Odd weights show every single changed bit. If two elements change places, the sum misses it with a probability below
2**-30, and below 2**-14 for elements of two bytes. A misplaced region moves many elements, and the probability is then
far smaller.

Invariant: memory beyond the tensor's is at most CHUNK elements and a few MiB of weights.
[test_sums: memory_beside_the_tensor_is_bounded]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from tidegate.elastic.model.memory import memory_at
from tidegate.elastic.plan.regions import Block

BLOCK = 1024
"""The columns that share a weight table: at most 8 KiB, so that the table stays in a core's first cache beside the
data.
"""
CHUNK = 1 << 22
"""The elements that are copied from another device to the host at once."""
_WORD_BYTES = 8
_MAX_KEPT = 1 << 18
"""The longest prefix of a sequence that is cached: more numbers than a large vocabulary has rows."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Numbers = npt.NDArray[np.uint64]


class OddNumbers:
    """A sequence of odd 64-bit numbers: splitmix64 (Steele, Lea, Flood 2014), made odd. It caches its first numbers."""

    def __init__(self, sequence: int) -> None:
        self._offset = np.uint64(sequence << 56)
        self._kept = self._made(0, 1)

    def at(self, first: int, count: int) -> Numbers:
        """`count` numbers from index `first` on, read-only."""
        end = first + count
        if end > _MAX_KEPT:
            return self._made(first, count)
        if end > len(self._kept):
            self._kept = self._made(0, min(2 * end, _MAX_KEPT))
        return self._kept[first:end]

    def _made(self, first: int, count: int) -> Numbers:
        mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) + self._offset
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return mixed | np.uint64(1)


class WeightedSums:
    """Sums tensors. It caches the weights of a block's columns, by the size summed at once (word or element)."""

    def __init__(self) -> None:
        words, self._rows, self._blocks = (OddNumbers(sequence) for sequence in (1, 2, 3))
        self._weights = {
            itemsize: np.left_shift.outer(
                words.at(0, BLOCK), 8 * np.arange(0, _WORD_BYTES, itemsize, dtype=np.uint64)
            ).reshape(-1)
            for itemsize in _INTEGERS
        }

    def of(self, tensor: torch.Tensor, blocks: Iterable[Block]) -> int:
        """The sum of the blocks of a flat tensor of any dtype and device."""
        bits = tensor.detach().view(_INTEGERS[tensor.itemsize])
        return sum(self._of_block(bits, block) for block in blocks) % 2**64

    def _of_block(self, bits: torch.Tensor, block: Block) -> int:
        total = 0
        for first, low, num, width, size in _spans(block.col, block.cols, bits.itemsize):
            factor = size // bits.itemsize
            weights = self._weights[size][low // factor : (low + width) // factor]
            begin = block.offset + first * BLOCK + low - block.col
            for row, rows, at, count in _chunks(block.rows, num, width):
                offset = begin + row * block.stride + at * BLOCK
                found = _on_host(bits, (rows, count, width), (block.stride, BLOCK, 1), offset)
                sums = np.einsum("rbc,c->rb", found.view(f"u{size}"), weights)
                sums *= self._rows.at(block.row + row, rows)[:, None]
                sums *= self._blocks.at(first + at, count)
                total += int(sums.sum())
        return total


def _on_host(
    bits: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> npt.NDArray[np.uint8]:
    """The elements as bytes in host memory."""
    if bits.device.type != "cpu":
        bits = bits.as_strided(shape, strides, bits.storage_offset() + offset).cpu()
        strides, offset = bits.stride(), 0
    # Read by address, because after `Tensor.numpy` the storage can no longer be resized. The last stride is 1.
    byte_strides = (*(stride * bits.itemsize for stride in strides[:-1]), 1)
    address = bits.data_ptr() + offset * bits.itemsize
    return memory_at(address, (*shape[:-1], shape[-1] * bits.itemsize), byte_strides, owner=bits)


def _spans(col: int, cols: int, itemsize: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Columns as (first block, first column in it, blocks, columns of each, bytes to sum at once).

    The order is: a cut block, whole blocks, a cut block. In cut blocks the elements of cut words are summed one by one.
    """
    block, low = divmod(col, BLOCK)
    if low:
        width = min(BLOCK - low, cols)
        yield from _cut(block, low, width, itemsize)
        block, cols = block + 1, cols - width
    num, rest = divmod(cols, BLOCK)
    if num:
        yield block, 0, num, BLOCK, _WORD_BYTES
    yield from _cut(block + num, 0, rest, itemsize)


def _cut(block: int, low: int, width: int, itemsize: int) -> Iterator[tuple[int, int, int, int, int]]:
    per_word = _WORD_BYTES // itemsize
    head = min(-low % per_word, width)
    body = (width - head) // per_word * per_word
    for start, size, at_once in (
        (low, head, itemsize),
        (low + head, body, _WORD_BYTES),
        (low + head + body, width - head - body, itemsize),
    ):
        if size:
            yield block, start, 1, size, at_once


def _chunks(rows: int, num: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, rows, block, blocks) of at most CHUNK elements."""
    blocks = min(num, CHUNK // BLOCK)
    step = max(CHUNK // (blocks * width), 1)
    for row in range(0, rows, step):
        for at in range(0, num, blocks):
            yield row, min(step, rows - row), at, min(blocks, num - at)
