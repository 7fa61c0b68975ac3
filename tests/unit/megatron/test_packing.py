"""Packing under a token cap: every sample once, equally many micro-batches per share, within the cap, evenly."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.megatron.batching import (
    BatchLimits,
    Filling,
    Limits,
    ReplicaPlace,
    TokenBatch,
    plan_micro_batches,
    replica_batches,
)
from tidegate.megatron.packing import Oversize, SampleOverCap, TokenCap, pack, token_cost
from tidegate.model_config import ModelConfig

LENGTHS = st.lists(st.integers(min_value=1, max_value=60), max_size=40)
FEW_LENGTHS = st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=6)
CAPS = st.builds(
    TokenCap,
    max_tokens=st.integers(4, 150),
    token_cost=st.integers(0, 40),
    pass_cost=st.none() | st.integers(0, 20_000),
    pad_multiple=st.sampled_from([1, 4]),
)
FREE_PASS_CAPS = CAPS.map(lambda cap: replace(cap, pass_cost=None))
"""Caps with which there are as few micro-batches as possible."""
SHARES = st.integers(1, 5)
MULTIPLES = st.integers(1, 3)


def run(lengths: list[int], cap: TokenCap, num_replicas: int, **place: int | bool | None) -> list[list[TokenBatch]]:
    """The micro-batches of each replica. Each sample's tokens are its own number."""
    sequences = [[index + 1] * length for index, length in enumerate(lengths)]
    places = [ReplicaPlace(replica, num_replicas, **place) for replica in range(num_replicas)]  # type: ignore[arg-type]  # of several types
    return [replica_batches(sequences, cap, place) for place in places]


def cost(cap: TokenCap, lengths: list[int], batch: tuple[int, ...]) -> int:
    return len(batch) * cap.row_cost(max((cap.row_length(lengths[index]) for index in batch), default=0))


@given(lengths=LENGTHS, cap=CAPS, num_replicas=SHARES, multiple=MULTIPLES, alike=st.booleans())
def test_each_sample_runs_once_within_the_cap_and_replicas_run_equally_many(
    lengths: list[int], cap: TokenCap, num_replicas: int, multiple: int, alike: bool
) -> None:
    replicas = run(lengths, cap, num_replicas, multiple=multiple, alike=alike)
    batches = list(chain.from_iterable(replicas))
    assert sorted(index for batch in batches for index in batch.sequences) == list(range(len(lengths)))
    (num_batches,) = {len(own) for own in replicas}
    assert num_batches % multiple == 0
    for batch in batches:
        for row, index in enumerate(batch.sequences):
            assert batch.tokens_BS[row].tolist() == [index + 1] * lengths[index] + [0] * (
                batch.shape[1] - lengths[index]
            )
        assert not batch.tokens_BS[len(batch.sequences) :].any()
        num_rows, row_length = batch.shape
        assert num_rows * row_length <= cap.max_tokens or num_rows == 1
    if alike:
        assert all(len({batch.shape for batch in same}) == 1 for same in zip(*replicas, strict=True))


@given(lengths=FEW_LENGTHS, cap=FREE_PASS_CAPS, num_shares=SHARES, multiple=MULTIPLES)
def test_no_packing_under_the_cap_has_fewer_micro_batches_or_a_cheaper_costliest_one(
    lengths: list[int], cap: TokenCap, num_shares: int, multiple: int
) -> None:
    within = [
        parts
        for parts in partitions(list(range(len(lengths))))
        if all(len(part) == 1 or positions(cap, lengths, part) <= cap.max_tokens for part in parts)
    ]
    num_needed = min(map(len, within))
    want_batches = math.ceil(num_needed / num_shares / multiple) * multiple
    want_cost = min(
        max(cost(cap, lengths, tuple(part)) for part in parts)
        for parts in within
        if len(parts) <= want_batches * num_shares
    )
    shares = pack(lengths, cap, num_shares=num_shares, multiple=multiple)
    assert [len(share) for share in shares] == [want_batches] * num_shares
    assert want_cost <= max(cost(cap, lengths, batch) for share in shares for batch in share) <= want_cost * 1.001


def positions(cap: TokenCap, lengths: list[int], part: list[int]) -> int:
    return len(part) * max(cap.row_length(lengths[index]) for index in part)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to divide the items into parts."""
    if not items:
        yield []
        return
    first, *others = items
    for parts in partitions(others):
        yield [[first], *parts]
        for number, part in enumerate(parts):
            yield [*parts[:number], [first, *part], *parts[number + 1 :]]


@given(lengths=LENGTHS, cap=FREE_PASS_CAPS, num_shares=SHARES, multiple=MULTIPLES, pass_cost=st.integers(0, 20_000))
def test_more_micro_batches_than_the_cap_needs_run_where_that_costs_less(
    lengths: list[int], cap: TokenCap, num_shares: int, multiple: int, pass_cost: int
) -> None:
    def total(shares: list[list[tuple[int, ...]]]) -> int:
        return sum(pass_cost + cost(cap, lengths, batch) for share in shares for batch in share)

    needed = pack(lengths, cap, num_shares=num_shares, multiple=multiple)
    chosen = pack(lengths, replace(cap, pass_cost=pass_cost), num_shares=num_shares, multiple=multiple)
    if len(chosen[0]) == len(needed[0]):
        assert chosen == needed
    else:
        assert len(chosen[0]) > len(needed[0])
        assert total(chosen) < total(needed)


@given(lengths=LENGTHS, cap=CAPS, num_shares=SHARES, multiple=MULTIPLES)
def test_a_micro_batch_is_empty_only_where_samples_are_too_few(
    lengths: list[int], cap: TokenCap, num_shares: int, multiple: int
) -> None:
    batches = list(chain.from_iterable(pack(lengths, cap, num_shares=num_shares, multiple=multiple)))
    assert batches.count(()) == max(0, len(batches) - len(lengths))


def test_equal_samples_are_spread_over_all_micro_batches() -> None:
    shares = pack([8] * 7, TokenCap(16), num_shares=3)
    assert sorted(sorted(map(len, share)) for share in shares) == [[1, 1], [1, 1], [1, 2]]


def test_a_pass_is_added_when_it_saves_more_padding_than_it_costs() -> None:
    lengths, cap = [64, 8, 8, 8], TokenCap(256, token_cost=100)
    saved = 3 * (cap.row_cost(64) - cap.row_cost(8))
    for pass_cost, want in ((saved, [[(0, 1, 2, 3)]]), (saved - 1, [[(0,), (1, 2, 3)]])):
        assert pack(lengths, replace(cap, pass_cost=pass_cost), num_shares=1) == want


@given(lengths=LENGTHS, cap=CAPS, num_shares=SHARES)
def test_shares_differ_by_no_more_than_the_costliest_micro_batch(
    lengths: list[int], cap: TokenCap, num_shares: int
) -> None:
    shares = pack(lengths, cap, num_shares=num_shares)
    costs = [[cost(cap, lengths, batch) for batch in share] for share in shares]
    assert max(map(sum, costs)) - min(map(sum, costs)) <= max(map(max, filter(None, costs)), default=0)


@given(lengths=LENGTHS, cap=CAPS, num_replicas=st.sampled_from([1, 2, 4]))
def test_micro_batches_of_logical_shards_do_not_depend_on_the_number_of_replicas(
    lengths: list[int], cap: TokenCap, num_replicas: int
) -> None:
    (want,) = run(lengths, cap, 1, num_shards=4)
    got = list(chain.from_iterable(run(lengths, cap, num_replicas, num_shards=4)))
    assert [batch.sequences for batch in got] == [batch.sequences for batch in want]


@given(lengths=LENGTHS, cap=CAPS, num_shares=SHARES, draw=st.randoms(use_true_random=False))
def test_another_order_of_the_same_lengths_is_packed_alike(
    lengths: list[int], cap: TokenCap, num_shares: int, draw: random.Random
) -> None:
    def lengths_of(lengths: list[int]) -> list[list[list[int]]]:
        return [[[lengths[index] for index in batch] for batch in share] for share in shares(lengths)]

    def shares(lengths: list[int]) -> list[list[tuple[int, ...]]]:
        return pack(lengths, cap, num_shares=num_shares)

    assert shares(lengths) == shares(lengths)
    assert lengths_of(draw.sample(lengths, len(lengths))) == lengths_of(lengths)


def test_the_micro_batches_of_a_long_tail_are_even() -> None:
    lengths = [64, 8, 8, 8, 8, 8, 8, 8, 8]
    assert pack(lengths, TokenCap(64, token_cost=1000), num_shares=2) == [[(0,)], [(1, 2, 3, 4, 5, 6, 7, 8)]]
    assert pack(lengths, TokenCap(64, token_cost=1000), num_shares=3) == [[(0,)], [(1, 2, 3, 4)], [(5, 6, 7, 8)]]


FILLINGS: dict[str, tuple[Limits, ReplicaPlace, Filling]] = {
    "one micro-batch": (TokenCap(64), ReplicaPlace(), Filling(1, 1 - 30 / 64, 64)),
    "a replica without samples, which runs a filler": (
        BatchLimits(max_sequences=4),
        ReplicaPlace(num_replicas=2),
        Filling(1, 1 - 30 / (64 + 8), 72),
    ),
    "logical shards, two a replica": (
        TokenCap(64),
        ReplicaPlace(num_replicas=2, num_shards=4),
        Filling(2, 1 - 30 / 40, 40),
    ),
}


@pytest.mark.parametrize(("limits", "place", "want"), FILLINGS.values(), ids=FILLINGS)
def test_the_filling_has_the_number_of_micro_batches_and_the_share_of_padding(
    limits: Limits, place: ReplicaPlace, want: Filling
) -> None:
    assert plan_micro_batches([16, 8, 5, 1], limits, place).filling == want
    assert plan_micro_batches([], limits, place).filling == Filling(0, 0.0, 0)


def test_the_example_in_the_docs() -> None:
    assert pack([900, 70, 64, 60, 30, 20], TokenCap(1024), num_shares=2) == [[(0,)], [(1, 2, 3, 4, 5)]]


def test_a_sample_over_the_cap_is_alone_in_its_micro_batch() -> None:
    assert pack([50, 4, 4], TokenCap(16, pad_multiple=4), num_shares=1) == [[(0,), (1, 2)]]


def test_a_sample_over_the_cap_is_refused_under_the_policy_refuse() -> None:
    cap = TokenCap(16, oversize=Oversize.REFUSE)
    assert pack([16, 16, 9], cap, num_shares=1) == [[(0,), (1,), (2,)]]
    with pytest.raises(SampleOverCap, match=r"^2 of 3 samples are .* takes 56 positions and the cap is 16; raise"):
        pack([50, 17, 9], cap, num_shares=1)


def test_shares_without_samples_run_empty_micro_batches_and_without_any_samples_none_run() -> None:
    assert pack([9, 9], TokenCap(16), num_shares=4, multiple=2) == [[(), ()], [(), ()], [(0,), ()], [(1,), ()]]
    assert pack([], TokenCap(16), num_shares=2, multiple=2) == [[], []]


def test_the_token_cost_is_the_number_of_attended_positions_that_cost_as_much_as_the_weights() -> None:
    model = ModelConfig(2, 64, 128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=40, max_seq_len=80)
    weights_of_a_layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    assert token_cost(model) == (2 * weights_of_a_layer + 64 * 40) // (2 * 2 * 64)


REFUSED = {
    "a cap that holds no row": ({"max_tokens": 7}, "max_tokens=7 holds no row: it must be at least pad_multiple=8"),
    "rows of no multiple": ({"max_tokens": 7, "pad_multiple": 0}, "pad_multiple=0 must be at least 1 and"),
    "a token that costs less than nothing": ({"max_tokens": 8, "token_cost": -1}, "token_cost=-1 at least 0"),
}


@pytest.mark.parametrize(("arguments", "want"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_cap_is_refused(arguments: dict[str, Any], want: str) -> None:
    with pytest.raises(ValueError, match=want):
        TokenCap(**arguments)
