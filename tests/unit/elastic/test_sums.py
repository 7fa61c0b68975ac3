"""The weighted sum of a tensor's bits is the same for every cut, and another for every change."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from tidegate.elastic.check.sums import BLOCK, CHUNK, WeightedSums
from tidegate.elastic.plan.regions import Block

ROWS, COLS = 3, 2 * BLOCK + 17
WHOLE = Block(0, 0, ROWS, COLS, 0, COLS)


@pytest.fixture(scope="module")
def sums() -> WeightedSums:
    return WeightedSums()


def values() -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (ROWS * COLS,), dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_every_cut_adds_up_to_the_whole(sums: WeightedSums, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (ROWS * COLS,)).to(dtype)
    want = sums.of(tensor, [WHOLE])
    for at in (1, 16, BLOCK - 1, BLOCK, BLOCK + 1, COLS - 1):
        by_column = [Block(0, 0, ROWS, at, 0, COLS), Block(0, at, ROWS, COLS - at, at, COLS)]
        assert sum(sums.of(tensor, [block]) for block in by_column) % 2**64 == want
        by_row = [Block(0, 0, 1, COLS, 0, COLS), Block(1, 0, ROWS - 1, COLS, COLS, COLS)]
        assert sums.of(tensor, by_row) == want


def test_a_shard_with_padding_counts_as_its_logical_elements(sums: WeightedSums) -> None:
    tensor = values()
    matrix = tensor.view(ROWS, COLS)
    shard = torch.cat([matrix[1:, 5:1000], torch.full((ROWS - 1, 24), 7.0)], dim=1).reshape(-1)
    want = sums.of(tensor, [Block(1, 5, ROWS - 1, 995, COLS + 5, COLS)])
    assert sums.of(shard, [Block(1, 5, ROWS - 1, 995, 0, 995 + 24)]) == want


def test_memory_beside_the_tensor_is_bounded(sums: WeightedSums) -> None:
    size = 4 * CHUNK
    tensor = torch.zeros(size, dtype=torch.float32)
    sums.of(tensor, [Block(0, 0, 1, size, 0, size)])
    tracemalloc.start()
    sums.of(tensor, [Block(0, 0, 1, size, 0, size)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < CHUNK * tensor.itemsize + (4 << 20)


def test_a_tensor_larger_than_one_chunk_has_the_sum_of_its_pieces(sums: WeightedSums) -> None:
    size = CHUNK + 3 * BLOCK + 5
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    pieces = [Block(0, start, 1, min(1 << 20, size - start), start, size) for start in range(0, size, 1 << 20)]
    assert sums.of(tensor, [Block(0, 0, 1, size, 0, size)]) == sums.of(tensor, pieces)


def test_every_flipped_bit_changes_the_sum_up_to_the_highest_bit_of_the_largest_element(sums: WeightedSums) -> None:
    bits = torch.randint(-(2**63), 2**63 - 1, (ROWS * COLS,))
    want = sums.of(bits, [WHOLE])
    for at in (0, BLOCK, ROWS * COLS - 1):
        for bit in range(64):
            mask = torch.tensor(1).bitwise_left_shift(bit)
            bits[at] ^= mask
            assert sums.of(bits, [WHOLE]) != want
            bits[at] ^= mask
    assert sums.of(bits, [WHOLE]) == want


@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, BLOCK + 3), (5, COLS + 5), (7, 2 * COLS + BLOCK)])
def test_two_elements_that_changed_places_change_the_sum(sums: WeightedSums, first: int, second: int) -> None:
    tensor = torch.ones(ROWS * COLS)
    tensor[first], tensor[second] = 2.0, 3.0
    want = sums.of(tensor, [WHOLE])
    tensor[first], tensor[second] = 3.0, 2.0
    assert sums.of(tensor, [WHOLE]) != want


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize(
    "block",
    [
        WHOLE,
        Block(1, 1, ROWS - 1, COLS - 2, COLS + 1, COLS),
        Block(0, BLOCK - 3, ROWS, 7, BLOCK - 3, COLS),
        Block(2, 2 * BLOCK, 1, 17, 2 * COLS + 2 * BLOCK, COLS),
        Block(5 * BLOCK, 3, ROWS, BLOCK, 3, COLS),
        Block(1, BLOCK, ROWS, BLOCK + 16, 8, 2 * BLOCK),
    ],
)
def test_torch_sums_as_numpy_does(sums: WeightedSums, dtype: torch.dtype, block: Block) -> None:
    num_bytes = ROWS * COLS * dtype.itemsize
    tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype)
    by_torch = WeightedSums(with_numpy=False)
    assert by_torch.of(tensor, [block]) == sums.of(tensor, [block])
    # Elements that do not begin at a word of the memory.
    behind = torch.cat([tensor[:1], tensor])[1:]
    assert by_torch.of(behind, [block, block]) == 2 * sums.of(tensor, [block]) % 2**64


def test_torch_sums_a_tensor_larger_than_one_chunk_as_numpy_does(sums: WeightedSums) -> None:
    size = CHUNK + 3 * BLOCK + 5
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    whole = [Block(0, 0, 1, size, 0, size)]
    assert WeightedSums(with_numpy=False).of(tensor, whole) == sums.of(tensor, whole)


@pytest.mark.parametrize("with_numpy", [True, False])
def test_each_of_several_tensors_has_its_own_sum(sums: WeightedSums, with_numpy: bool) -> None:
    parts = [(values(), [WHOLE]), (values(), []), (values().to(torch.bfloat16), [WHOLE])]
    want = [sums.of(tensor, blocks) for tensor, blocks in parts]
    assert WeightedSums(with_numpy=with_numpy).of_each(parts) == want
    assert WeightedSums(with_numpy=with_numpy).of_each([]) == []
