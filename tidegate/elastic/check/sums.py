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

Tensors in host memory are summed there, by numpy. Those of another device are summed on it, by torch, whose 64-bit
integers wrap as numpy's do. Only the sums come back, those of a device together: bringing the tensors to the host took
79 % of a reshard on one H200, and at each wait for a sum another process of the device may go first.

Invariants:
- Memory beyond the tensor's is at most two times CHUNK elements and a few MiB of weights.
  [test_sums: memory_beside_the_tensor_is_bounded]
- Both ways give the same sum. [test_sums: torch_sums_as_numpy_does]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
"""The elements that are summed at once."""
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
        self._kept_on: dict[torch.device, torch.Tensor] = {}

    def at(self, first: int, count: int) -> Numbers:
        """`count` numbers from index `first` on, read-only."""
        end = first + count
        if end > _MAX_KEPT:
            return self._made(first, count)
        if end > len(self._kept):
            self._kept = self._made(0, min(2 * end, _MAX_KEPT))
        return self._kept[first:end]

    def on(self, device: torch.device, first: int, count: int) -> torch.Tensor:
        """The same numbers, as 64-bit integers on the device."""
        end = first + count
        if end > _MAX_KEPT:
            return _on(device, self._made(first, count))
        kept = self._kept_on.get(device)
        if kept is None or end > len(kept):
            kept = self._kept_on[device] = _on(device, self.at(0, min(2 * end, _MAX_KEPT)))
        return kept[first:end]

    def _made(self, first: int, count: int) -> Numbers:
        mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) + self._offset
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return mixed | np.uint64(1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a block that is summed at once: of each row, `count` neighbouring BLOCKs, of each the same columns.

    - row, block: the first logical row and BLOCK.
    - low, width: the columns of each BLOCK, in elements.
    - size: the bytes of the integers that are summed, a word's or an element's.
    - offset, stride: of the flat tensor, in elements; the stride is that of a row.
    """

    row: int
    rows: int
    block: int
    count: int
    low: int
    width: int
    size: int
    offset: int
    stride: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.count, self.width

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.stride, BLOCK, 1


class WeightedSums:
    """Sums tensors. It caches the weights of a block's columns, by the size summed at once (word or element).

    `with_numpy`: whether numpy sums what is in host memory.
    """

    def __init__(self, *, with_numpy: bool = True) -> None:
        words, self._rows, self._blocks = (OddNumbers(sequence) for sequence in (1, 2, 3))
        self._with_numpy = with_numpy
        self._weights = {
            itemsize: np.left_shift.outer(
                words.at(0, BLOCK), 8 * np.arange(0, _WORD_BYTES, itemsize, dtype=np.uint64)
            ).reshape(-1)
            for itemsize in _INTEGERS
        }
        self._weights_on: dict[tuple[torch.device, int], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor, blocks: Iterable[Block]) -> int:
        """The sum of the blocks of a flat tensor of any dtype and device."""
        (total,) = self.of_each([(tensor, blocks)])
        return total

    def of_each(self, parts: Iterable[tuple[torch.Tensor, Iterable[Block]]]) -> list[int]:
        """The sum of each tensor's blocks. One wait for all tensors of a device."""
        totals = [self._total(tensor, blocks) for tensor, blocks in parts]
        by_device: defaultdict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for total in totals:
            if isinstance(total, torch.Tensor):
                by_device[total.device].append(total)
        read = {device: iter(torch.stack(those).tolist()) for device, those in by_device.items()}
        return [(next(read[of.device]) if isinstance(of, torch.Tensor) else of) % 2**64 for of in totals]

    def _total(self, tensor: torch.Tensor, blocks: Iterable[Block]) -> int | torch.Tensor:
        """The sum, not yet modulo 2**64. A tensor of one number where torch sums, which may not have done it yet."""
        bits = tensor.detach().view(_INTEGERS[tensor.itemsize])
        pieces = (piece for block in blocks for piece in _pieces(block, bits.itemsize))
        if self._with_numpy and bits.device.type == "cpu":
            return sum(self._with_numpy_of(bits, piece) for piece in pieces)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for piece in pieces:
            total += self._with_torch_of(bits, piece)
        return total

    def _with_numpy_of(self, bits: torch.Tensor, piece: _Piece) -> int:
        # Read by address, because after `Tensor.numpy` the storage can no longer be resized. The last stride is 1.
        byte_strides = (*(stride * bits.itemsize for stride in piece.strides[:-1]), 1)
        address = bits.data_ptr() + piece.offset * bits.itemsize
        shape = (*piece.shape[:-1], piece.width * bits.itemsize)
        found = memory_at(address, shape, byte_strides, owner=bits)
        weights = self._weights[piece.size][_columns(piece, bits.itemsize)]
        sums = np.einsum("rbc,c->rb", found.view(f"u{piece.size}"), weights)
        sums *= self._rows.at(piece.row, piece.rows)[:, None]
        sums *= self._blocks.at(piece.block, piece.count)
        return int(sums.sum())

    def _with_torch_of(self, bits: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """On the tensor's device; no copy to the host and no wait."""
        if piece.size == _WORD_BYTES:
            values = _words(bits, piece)
        else:
            found = bits.as_strided(piece.shape, piece.strides, bits.storage_offset() + piece.offset)
            values = found.to(torch.int64) & (2 ** (8 * piece.size) - 1)
        weights = self._weights_of(bits.device, piece.size)[_columns(piece, bits.itemsize)]
        sums = (values * weights).sum(-1)
        sums *= self._rows.on(bits.device, piece.row, piece.rows)[:, None]
        sums *= self._blocks.on(bits.device, piece.block, piece.count)
        return sums.sum()

    def _weights_of(self, device: torch.device, size: int) -> torch.Tensor:
        kept = self._weights_on.get((device, size))
        if kept is None:
            kept = self._weights_on[device, size] = _on(device, self._weights[size])
        return kept


def _words(bits: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """The piece's words: in place where they are words of the memory too, and otherwise a copy."""
    per_word = _WORD_BYTES // bits.itemsize
    begin = bits.storage_offset() + piece.offset
    if begin % per_word or piece.stride % per_word:
        found = bits.as_strided(piece.shape, piece.strides, begin)
        return found.clone(memory_format=torch.contiguous_format).view(torch.int64)
    rows, count, width = piece.shape
    strides = (piece.stride // per_word, BLOCK // per_word, 1)
    words = torch.empty(0, dtype=torch.int64, device=bits.device)
    return words.set_(bits.untyped_storage(), begin // per_word, (rows, count, width // per_word), strides)


def _on(device: torch.device, numbers: Numbers) -> torch.Tensor:
    # A copy: torch warns of arrays that it may not write, and the cached numbers are such.
    return torch.from_numpy(numbers.astype(np.int64)).to(device)


def _columns(piece: _Piece, itemsize: int) -> slice:
    """The weights of the piece's columns."""
    factor = piece.size // itemsize
    return slice(piece.low // factor, (piece.low + piece.width) // factor)


def _pieces(block: Block, itemsize: int) -> Iterator[_Piece]:
    for first, low, num, width, size in _spans(block.col, block.cols, itemsize):
        begin = block.offset + first * BLOCK + low - block.col
        for row, rows, at, count in _chunks(block.rows, num, width):
            offset = begin + row * block.stride + at * BLOCK
            yield _Piece(block.row + row, rows, first + at, count, low, width, size, offset, block.stride)


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
