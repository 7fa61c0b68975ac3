"""Bundles follow from the groups before them, and go to the logical shards so that replicas work at the same time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.megatron.batching import BatchLimits, Limits, ReplicaPlace
from tidegate.megatron.bundles import bundles_of, plan_bundles, shard_of
from tidegate.megatron.packing import TokenCap

GROUPS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=12)
LIMITS = st.one_of(st.integers(1, 12).map(BatchLimits), st.integers(8, 400).map(TokenCap))

FULL = {
    "two groups fill a micro-batch": ([[5, 5]] * 5, BatchLimits(4), (2, 2, 1), 2),
    "a group fills two micro-batches": ([[5] * 8] * 3, BatchLimits(4), (1, 1, 1), 3),
    "a third group would not fit": ([[5] * 3] * 4, BatchLimits(8), (2, 2), 2),
    "padded rows fill the cap": ([[7, 9], [8, 8], [30]], TokenCap(48), (2, 1), 2),
    "no group": ([], BatchLimits(4), (), 0),
}


@pytest.mark.parametrize(("groups", "limits", "want", "want_full"), FULL.values(), ids=FULL)
def test_a_bundle_is_full_when_another_group_of_its_mean_size_would_not_fit(
    groups: list[list[int]], limits: Limits, want: tuple[int, ...], want_full: int
) -> None:
    bundles = bundles_of(groups, limits)
    assert (bundles.sizes, bundles.num_full) == (want, want_full)


@given(groups=GROUPS, limits=LIMITS, count=st.integers(0, 12))
def test_later_groups_change_no_full_bundle(groups: list[list[int]], limits: Limits, count: int) -> None:
    early, late = bundles_of(groups[:count], limits), bundles_of(groups, limits)
    assert late.sizes[: early.num_full] == early.sizes[: early.num_full]
    assert sum(late.sizes) == len(groups)


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_of_as_many_consecutive_bundles_as_replicas_each_replica_gets_one(dp: int) -> None:
    for first in range(0, 32, dp):
        replicas = {shard_of(bundle, 8) // (8 // dp) for bundle in range(first, first + dp)}
        assert replicas == set(range(dp))


@given(groups=GROUPS, limits=LIMITS, count=st.integers(0, 12), dp=st.sampled_from([1, 2, 4]))
def test_micro_batches_do_not_depend_on_the_portions(
    groups: list[list[int]], limits: Limits, count: int, dp: int
) -> None:
    sizes = bundles_of(groups, limits).sizes
    places = iter(groups)
    bundles = [[length for _ in range(size) for length in next(places)] for size in sizes]
    place = ReplicaPlace(num_replicas=dp, num_shards=4)

    def lengths_of_shards(part: list[list[int]], first: int) -> list[list[list[int]]]:
        lengths = [length for bundle in part for length in bundle]
        shares = plan_bundles(lengths, list(map(len, part)), limits, place, first_bundle=first).shares
        return [[[lengths[index] for index in batch] for batch in share] for share in shares]

    count = min(count, len(bundles))
    whole = lengths_of_shards(bundles, 0)
    before, after = lengths_of_shards(bundles[:count], 0), lengths_of_shards(bundles[count:], count)
    assert [early + late for early, late in zip(before, after, strict=True)] == whole


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bundles of \[2, 2\] samples are not the 3 samples"):
        plan_bundles([5, 6, 7], [2, 2], BatchLimits(4), ReplicaPlace(num_shards=2), first_bundle=0)
