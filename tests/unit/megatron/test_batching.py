"""Cutting, assigning and padding micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.megatron.batching import BatchLimits, ReplicaPlace, cut, deal, pad, padded_length, replica_batches

LENGTHS = st.lists(st.integers(min_value=2, max_value=40), max_size=30)


@given(
    lengths=LENGTHS,
    max_sequences=st.none() | st.integers(1, 5),
    max_tokens=st.none() | st.integers(1, 100),
    num_replicas=st.integers(1, 5),
)
def test_each_sequence_is_in_one_micro_batch_within_the_limits_and_replicas_run_equally_many(
    lengths: list[int], max_sequences: int | None, max_tokens: int | None, num_replicas: int
) -> None:
    limits = BatchLimits(max_sequences=max_sequences, max_tokens=max_tokens, pad_multiple=4)
    batches = cut(lengths, limits)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        tokens = len(batch) * padded_length(max(lengths[index] for index in batch), limits)
        assert max_sequences is None or len(batch) <= max_sequences
        assert max_tokens is None or tokens <= max_tokens or len(batch) == 1
    dealt = [deal(batches, num_replicas=num_replicas, replica=replica) for replica in range(num_replicas)]
    assert len({len(own) for own in dealt}) == 1
    assert sorted(batch for own in dealt for batch in own if batch) == sorted(batches)


def test_the_longest_sequences_go_first_and_equal_ones_in_order() -> None:
    assert cut([3, 9, 3, 9, 5], BatchLimits(max_sequences=2)) == [(1, 3), (4, 0), (2,)]


def test_a_sequence_over_the_token_limit_goes_alone() -> None:
    assert cut([50, 4, 4], BatchLimits(max_tokens=16)) == [(0,), (1, 2)]


def test_rows_are_padded_with_zeros_to_a_multiple() -> None:
    batch = pad([[1, 2, 3], [4, 5, 6, 7, 8]], (1, 0), BatchLimits(pad_multiple=4))
    want = [[4, 5, 6, 7, 8, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert batch.tokens_BS.tolist() == want
    assert batch.sequences == (1, 0)


def test_a_replica_with_too_few_micro_batches_runs_a_filler_without_sequences() -> None:
    limits = BatchLimits(max_sequences=1, pad_multiple=4)
    batches = replica_batches([[1, 2], [3, 4], [5, 6]], limits, ReplicaPlace(1, 2))
    assert [batch.sequences for batch in batches] == [(1,), ()]
    assert np.array_equal(batches[1].tokens_BS, np.zeros((1, 4)))


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_each_replica_runs_its_logical_shards_one_after_another_for_any_number_of_replicas(num_replicas: int) -> None:
    limits = BatchLimits(max_sequences=1)
    run = [
        batch.sequences
        for replica in range(num_replicas)
        for batch in replica_batches([[1, 2]] * 6, limits, ReplicaPlace(replica, num_replicas, num_shards=4))
    ]
    assert run == [(0,), (4,), (1,), (5,), (2,), (), (3,), ()]


def test_replicas_that_divide_experts_run_micro_batches_of_one_shape() -> None:
    limits = BatchLimits(max_tokens=12, pad_multiple=4)
    sequences = [[7] * length for length in (9, 5, 5, 4, 3, 2, 2)]
    plain, alike = (
        [replica_batches(sequences, limits, ReplicaPlace(r, 2, alike=alike)) for r in range(2)]
        for alike in (False, True)
    )
    assert [batch.shape for batch in plain[0]] != [batch.shape for batch in plain[1]]
    for replica in range(2):
        assert [batch.shape for batch in alike[replica]] == [batch.shape for batch in alike[0]]
        for before, after in zip(plain[replica], alike[replica], strict=True):
            rows, length = before.shape
            assert after.sequences == before.sequences
            assert np.array_equal(after.tokens_BS[:rows, :length], before.tokens_BS)
            assert after.tokens_BS.sum() == before.tokens_BS.sum()


def test_without_sequences_no_replica_has_a_micro_batch() -> None:
    assert replica_batches([], BatchLimits(), ReplicaPlace(1, 2)) == []


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        BatchLimits(max_tokens=0)
