"""The duration of the trainer's switches depends on their sizes, and policies count it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policy.situation import Situation, Split
from services.scheduler.policy.stages import remaining_work, slowest_stage_s
from services.scheduler.policy.tide.cluster import gpus_there
from services.scheduler.policy.tide.foresight import Foresight, TideRules
from services.scheduler.policy.tide.memory import TideMemory
from services.scheduler.state.observed import TrainerRate
from services.scheduler.state.remembered import Assignment, Remembered
from services.scheduler.state.switch_costs import ReshardCosts, TrainerSwitchCosts, switch_seconds
from services.scheduler.state.values import Placed
from tests.unit.scheduler.situations import gpus, job, seen
from tidegate.types import Layout

# A copy has one GPU, 8 bytes of weights and 24 of the optimizer's state. A rank sends a byte a second.
RESHARD = ReshardCosts(
    setup_s=1.0, communicators_s=5.0, bytes_per_s=1.0, weight_bytes=8, optimizer_bytes=24, gpus_per_host=8
)
COSTS = TrainerSwitchCosts(load_s=7.0, reshard_s=3.0, reshard=RESHARD)
MOVES = {
    "a copy that joins receives its weights and half of the state": (1, 2, 8 + 12),
    "one copy gives the weights to three": (1, 4, 3 * 8 + 24 * 3 / 4),
    "two copies share what they give to four": (2, 6, 2 * 8 + 12),
    "a copy that joins four receives all and each gives a quarter": (4, 5, 8 + 24 / 5),
    "the remaining copy receives the parts that it lacked": (4, 1, 24 * 3 / 4),
    "the last copy of four that become three keeps least": (4, 3, 24 * (1 / 3 - 1 / 12)),
}


@pytest.mark.parametrize("case", MOVES)
def test_a_change_takes_its_setup_its_groups_and_its_busiest_ranks_bytes(case: str) -> None:
    before, after, want = MOVES[case]
    seconds = switch_seconds(COSTS, copy_size=1, most=6)
    assert seconds[before, after] == pytest.approx(1 + 5 + want)


def test_no_change_takes_no_time() -> None:
    assert not switch_seconds(COSTS, copy_size=1, most=6).diagonal().any()


def test_a_trainer_without_gpus_is_loaded_and_without_bytes_all_reshards_take_the_same_time() -> None:
    assert switch_seconds(COSTS, copy_size=1, most=3)[0].tolist() == [0.0, 7.0, 7.0, 7.0]
    flat = switch_seconds(replace(COSTS, reshard=None), copy_size=1, most=3)
    assert flat[1:, 1:].tolist() == [[0.0, 3.0, 3.0], [3.0, 0.0, 3.0], [3.0, 3.0, 0.0]]


def test_copies_on_a_half_full_host_serve_only_the_copies_that_join_them_there() -> None:
    """Three copies of four GPUs on hosts of eight become seven.

    The third copy serves the fourth alone, and each of the three serves one of the remaining three.
    """
    weights, state = 8 / 4, 24 / 4
    moved = RESHARD.busiest_bytes(np.array(3.0), np.array(7.0), copy_size=4)
    assert float(moved) == pytest.approx(weights * (1 + 3 / 3) + state / 3)
    on_full_hosts = replace(RESHARD, gpus_per_host=4).busiest_bytes(np.array(3.0), np.array(7.0), copy_size=4)
    assert float(on_full_hosts) == pytest.approx(weights * 4 / 3 + state / 3)


# The policies below have 16 GPUs, and two copies of two GPUs train.

SPEC = job(actor=4, rollout=10, inference=2, actor_tp=2, rollout_tp=2, prompts=32, group_size=4, minibatches=4)
AT_WORK = Assignment(
    tuple(gpus(at, at + 2) for at in range(4, 14, 2)), Placed(gpus(0, 4), Layout(tp=2, dp=2)), gpus(14, 16)
)
RATES = (TrainerRate(Layout(tp=2, dp=2), 40.0),)
FAST = ReshardCosts(
    setup_s=0.0, communicators_s=0.0, bytes_per_s=1e15, weight_bytes=1, optimizer_bytes=1, gpus_per_host=8
)


def between_updates(reshard: ReshardCosts) -> Situation:
    """The first of four minibatches is done and half of the iteration generated."""
    memory = TideMemory(is_begun=True, num_answered=1)
    remembered = Remembered(iteration=0, assignment=AT_WORK, own=memory)
    situation = seen(
        SPEC, AT_WORK, num_unfinished=64, measured=RATES, num_done=1, num_taken=8, remembered=remembered, now_ms=50_000
    )
    return replace(situation, costs=replace(situation.costs, reshard=reshard))


def planned_copies(situation: Situation) -> int:
    recalled = situation.recalled(TideMemory)
    assert recalled is not None
    found = Foresight(TideRules()).plan(situation, *recalled, gpus_there(situation), is_move=True)
    return int(found.plan.trainer[0, 0]) // 2


def test_a_move_whose_bytes_take_longer_than_it_gains_is_not_made() -> None:
    assert planned_copies(between_updates(FAST)) > 2
    heavy = replace(FAST, bytes_per_s=1.0, weight_bytes=10_000, optimizer_bytes=60_000)
    assert planned_copies(between_updates(heavy)) == 2


def test_dynarls_score_counts_what_the_change_moves() -> None:
    heavy = replace(FAST, setup_s=2.0, bytes_per_s=10.0, weight_bytes=400, optimizer_bytes=0)
    splits = Split(3, 8, 2), Split(1, 12, 2)
    small, large = (
        [slowest_stage_s(situation, remaining_work(situation, uses_hints=False), split) for split in splits]
        for situation in (between_updates(FAST), between_updates(heavy))
    )
    # A rank has 200 bytes. Two copies that join two receive for 20 s. If four join, each of the two serves two: 40 s.
    assert [after - before for before, after in zip(small, large, strict=True)] == pytest.approx([22.0, 42.0])
