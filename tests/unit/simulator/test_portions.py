"""The simulated trainer takes the portions of the actor, and its busiest replica sets their time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cost_model import TrainerCosts
from simulator.faults import GpuFault
from simulator.happenings import What
from simulator.lengths import Lengths
from simulator.portions import Portions
from simulator.workload import Workload
from tests.unit.simulator.small import CLUSTER, workload, world
from tidegate.megatron.batching import BatchLimits, Limits
from tidegate.megatron.packing import TokenCap
from tidegate.types import Layout, MinibatchOrder

COSTS = TrainerCosts(fixed_s=1.0, rate_tokens_per_s=100.0, rate_gpus=1, exponent=1.0)
GROUP = ((20,), (20,))
"""Two sequences. Each has 30 tokens with its prompt of 10, which are 32 positions of a micro-batch."""
TWO_GROUPS = TokenCap(64)
"""A micro-batch is full with one group: another one would not fit."""


def portions(limits: Limits | None, *, carries: bool = False, streams: bool = True) -> Portions:
    work = workload([GROUP] * 8, carries=carries, streams=streams)
    return Portions(replace(work, limits=limits), COSTS)


def taken(limits: Limits | None, num_groups: int, *, dp: int, carries: bool = False) -> tuple[int, ...]:
    own = portions(limits, carries=carries).next(range(num_groups), num_missing=4, layout=Layout(dp=dp))
    return own.prompts if own else ()


def test_a_portion_waits_until_each_replica_gets_a_full_micro_batch() -> None:
    assert taken(TWO_GROUPS, 1, dp=2) == ()
    assert taken(TWO_GROUPS, 2, dp=2) == (0, 1)
    assert taken(TWO_GROUPS, 3, dp=2) == (0, 1)
    assert taken(TWO_GROUPS, 1, dp=1) == (0,)


def test_the_last_portion_has_all_that_are_left() -> None:
    assert taken(TWO_GROUPS, 4, dp=3) == (0, 1, 2, 3)
    assert taken(TWO_GROUPS, 7, dp=3) == (0, 1, 2, 3), "a minibatch has four groups"


def test_where_a_resize_carries_gradients_a_portion_is_short() -> None:
    """Two seconds are 200 tokens, and a group has 60."""
    assert taken(TWO_GROUPS, 4, dp=1) == (0, 1, 2, 3)
    assert taken(TWO_GROUPS, 4, dp=1, carries=True) == (0, 1, 2)


def test_without_limits_each_group_is_a_portion() -> None:
    assert taken(None, 3, dp=2) == (0,)


@pytest.mark.parametrize("limits", [None, TWO_GROUPS])
def test_without_streaming_a_minibatch_waits_for_all_its_groups(limits: Limits | None) -> None:
    own = portions(limits, streams=False)
    assert own.next(range(3), num_missing=4, layout=Layout(dp=2)) is None
    assert own.next(range(4), num_missing=4, layout=Layout(dp=2)) is not None


def test_the_replica_with_the_most_tokens_sets_the_time() -> None:
    """The replicas get 40 and 20 tokens."""
    lengths = Lengths((((30,), (10,)),), hints=(1.0,))
    own = Portions(Workload(lengths, 1, prompt_tokens=0, limits=BatchLimits(max_sequences=1)), COSTS)
    portion = own.next([0], num_missing=1, layout=Layout(dp=2))
    assert portion is not None
    assert own.unevenness(portion, size=1, first_bundle=0, layout=Layout(dp=2)) == pytest.approx(30 / 20)
    assert own.unevenness(portion, size=1, first_bundle=0, layout=Layout(dp=1)) == 1


def test_an_update_takes_the_tokens_of_prompts_and_responses() -> None:
    for over in (world(workload([GROUP] * 8)), world(replace(workload([GROUP] * 8), limits=TWO_GROUPS))):
        counts = [each.count for each in over.happenings() if each.what is What.MINIBATCH_FINISHED]
        assert counts == [4 * 2 * (20 + 10)] * 2
        scored = [each.count for each in over.history if each.what is What.GROUP_INFERRED]
        assert scored == [2 * (20 + 10)] * 8


def test_in_fixed_order_a_group_waits_for_those_before_it() -> None:
    """The first group is the last to be complete, so the first minibatch begins with the last group of all."""
    work = workload([((2000,), (2000,)), *[GROUP] * 7], order=MinibatchOrder.FIXED)
    over = world(work)
    at_s = [each.at_s for each in over.happenings() if each.what is What.GROUP_INFERRED and each.number == 0]
    started = [each.at_s for each in over.history if each.what is What.MINIBATCH_STARTED]
    assert started[0] == at_s[0]
    assert over.trainer.trained == list(range(8))


def test_after_a_death_the_groups_of_a_portion_are_trained_again_in_their_order() -> None:
    work = replace(workload([GROUP] * 8, order=MinibatchOrder.FIXED), limits=TWO_GROUPS)
    begins = next(each.at_s for each in world(work).happenings() if each.what is What.MINIBATCH_STARTED)
    over = world(work, faults=[GpuFault(begins + 0.01, CLUSTER[0])])
    again = 0
    for happening in over.happenings():
        if happening.what is What.TRAINER_DIED:
            again = happening.count
            over.resize_trainer(CLUSTER[1:2], Layout())
    assert again == 4, "the last portion was under way"
    assert over.trainer.trained == list(range(8))


LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=2), min_size=8, max_size=8)


@given(
    lengths=LENGTHS,
    dp=st.integers(1, 4),
    num_shards=st.sampled_from([None, 4]),
    limits=st.sampled_from([None, TWO_GROUPS, TokenCap(64, 300, 256 * 300), BatchLimits(max_sequences=3)]),
    carries=st.booleans(),
)
def test_portions_cover_every_group_and_the_busiest_replica_has_at_least_a_fair_share(
    lengths: list[list[int]], dp: int, num_shards: int | None, limits: Limits | None, carries: bool
) -> None:
    turns = tuple(tuple((length,) for length in row) for row in lengths)
    work = Workload(
        Lengths(turns, hints=(1.0,) * 8),
        1,
        prompt_tokens=5,
        limits=limits,
        carries_gradients=carries,
        num_logical_shards=num_shards if num_shards and num_shards % dp == 0 else None,
    )
    own, layout, left, num_bundles = Portions(work, COSTS), Layout(dp=dp), list(range(8)), 0
    while left:
        portion = own.next(left, num_missing=len(left), layout=layout)
        assert portion is not None
        assert list(portion.prompts) == left[: len(portion.prompts)]
        assert own.unevenness(portion, size=8, first_bundle=num_bundles, layout=layout) >= 1 - 1e-9
        left = left[len(portion.prompts) :]
        num_bundles += len(portion.bundle_sizes)
        assert portion.is_last == (not left)
