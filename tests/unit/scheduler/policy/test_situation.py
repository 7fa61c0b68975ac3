"""What a policy sees is whole and free of contradictions, and what it remembers is a part of the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.policy.dynarl import DynaRLMemory
from services.scheduler.policy.phases import PhasesMemory
from services.scheduler.policy.rlinf import RLinfMemory
from services.scheduler.policy.situation import Situation, Trainer
from services.scheduler.policy.tide.memory import PlannedStage, TideMemory, TidePlan
from services.scheduler.shell.codecs.state_codec import decode_state, encode_state
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.layouts import Replica, largest_dp, most_copies, replica_size, replicas, with_dp
from services.scheduler.state.observed import Engine, Inferring, Training
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import Placed
from tests.unit.scheduler.fake_parts import JOB
from tests.unit.scheduler.situations import gpus, job, seen
from tidegate.types import Layout

SPEC = job(actor=2, rollout=4, inference=2, prompts=8, group_size=2, minibatches=2)
HOME = as_configured(SPEC)


def whole() -> Situation:
    return seen(SPEC, HOME, num_unfinished=6, num_unsubmitted=1)


def changed(**fields: Any) -> Situation:
    return replace(whole(), **fields)


def with_gpus(held: Replica) -> tuple[Engine, ...]:
    """The first engine has others."""
    engines = whole().engines
    return (replace(engines[0], gpus=held), *engines[1:])


def trained(**fields: Any) -> Situation:
    trainer = whole().trainer
    return changed(trainer=replace(trainer, training=replace(trainer.training, **fields)))


def with_ready(*groups: int) -> Situation:
    return changed(inference=replace(whole().inference, inferring=Inferring(groups)))


def test_a_whole_situation_counts_what_runs_and_what_waits() -> None:
    situation = whole()
    assert (situation.num_sequences, situation.num_unfinished, situation.num_submitted) == (16, 6, 5)
    assert not situation.is_inferred


CONTRADICTIONS: dict[str, tuple[Callable[[], Situation], str]] = {
    "a GPU in two places": (lambda: changed(free=gpus(0, 1)), "n0/0 in two places"),
    "a GPU that is on its way and free": (lambda: changed(free=gpus(8, 9), moving=gpus(8, 9)), "n0/8 in two places"),
    "an engine of another size": (
        lambda: replace(whole(), generation=replace(whole().generation, engines=with_gpus(gpus(8, 10)))),
        "1 of 4 engines have not 1 GPUs",
    ),
    "a trainer that lacks ranks": (
        lambda: changed(trainer=Trainer(Placed(gpus(0, 1), Layout(dp=2)), Training())),
        "the trainer has 1 GPUs, its layout 2 ranks",
    ),
    "more minibatches than there are": (
        lambda: trained(num_minibatches_done=3),
        "3 minibatches are done, it has 2",
    ),
    "a minibatch on no GPUs": (
        lambda: changed(trainer=Trainer(None, Training(is_at_boundary=False))),
        "the trainer has no GPUs",
    ),
    "groups of another size": (
        lambda: changed(generation=replace(whole().generation, group_size=1)),
        "16 groups of 1; the job has at least 8 of 2",
    ),
    "too few groups": (
        lambda: seen(replace(SPEC, num_prompts=9), HOME, picture=whole().generation),
        "8 groups of 2; the job has at least 9 of 2",
    ),
    "a group handed on that is generated": (
        lambda: with_ready(7),
        "inference handed a group on that is still generated, or none of the iteration's",
    ),
    "a group handed on that there is not": (
        lambda: with_ready(8),
        "inference handed a group on that is still generated, or none of the iteration's",
    ),
    "more taken than are ready": (lambda: trained(num_taken=6), "the trainer took 6 groups of 5 that are ready"),
    "an inference that infers nothing": (
        lambda: changed(inference=replace(whole().inference, measured_tokens_per_s_per_gpu=0.0)),
        "inference's rate is 0.0, it must be above 0",
    ),
    "a cost below nothing": (
        lambda: changed(costs=replace(whole().costs, update_s=-1.0)),
        "update_s=-1.0 is a time, it must be at least 0",
    ),
    "lengths without a spread": (
        lambda: changed(lengths=replace(whole().lengths, sigma_group=0.0)),
        "sigma_group is 0.0, it must be above 0",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_situation_that_contradicts_itself_is_refused(name: str) -> None:
    make, want = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match="situation of iteration 0") as refused:
        make()
    assert want in str(refused.value)


def test_an_assignment_gives_a_gpu_once_and_the_trainer_one_for_each_rank() -> None:
    with pytest.raises(ValueError, match=r"1 GPUs are assigned twice \(n0/1\)"):
        Assignment((gpus(0, 2),), None, gpus(1, 3))
    with pytest.raises(ValueError, match="trainer on 3 GPUs with layout dp2: it has 2 ranks"):
        Assignment((), Placed(gpus(0, 3), Layout(dp=2)), ())


@pytest.mark.parametrize(
    "remembered",
    [
        Remembered(),
        Remembered(2, 5, HOME, own=DynaRLMemory(is_begun=True, num_answered=3, low_since_ms=1234, pending_engines=0)),
        Remembered(2, 5, HOME, trains=False, own=RLinfMemory(is_begun=False, num_answered=3)),
        Remembered(2, 5, HOME, own=PhasesMemory()),
        Remembered(2, 5, HOME, own=TideMemory(True, 2, TidePlan(1, (PlannedStage(4, 2),), 9, 0))),
        Remembered(iteration=0, assignment=Assignment((gpus(0, 2), gpus(4, 6)), None, ())),
    ],
)
def test_what_a_policy_remembers_comes_back_from_the_states_bytes(remembered: Remembered) -> None:
    state = ClusterState(job=JOB, remembered=remembered)
    encoded = encode_state(state)
    assert decode_state(encoded) == state
    assert encode_state(decode_state(encoded)) == encoded


def test_what_was_remembered_counts_in_its_own_iteration_and_incarnation_alone() -> None:
    remembered = Remembered(incarnation=1, iteration=2, assignment=HOME)
    assert remembered.is_of(1, 2)
    assert not remembered.is_of(2, 2)
    assert not remembered.is_of(1, 3)
    assert not Remembered().is_of(0, 0)


def test_a_policy_recalls_its_own_memory_and_no_other_policys() -> None:
    memory = RLinfMemory(is_begun=True)
    situation = changed(remembered=Remembered(iteration=0, assignment=HOME, own=memory))
    assert situation.recalled(RLinfMemory) == (HOME, memory)
    assert situation.recalled(TideMemory) is None
    assert replace(situation, iteration=1).recalled(RLinfMemory) is None


def test_gpus_that_do_not_fill_an_engine_are_left_out() -> None:
    assert replicas(gpus(0, 5), 2) == (gpus(0, 2), gpus(2, 4))


def test_copies_that_the_experts_do_not_divide_over_make_no_layout() -> None:
    assert with_dp(Layout(dp=2, ep=2), 3) is None
    assert with_dp(Layout(dp=2, ep=2), 4) == Layout(dp=4, ep=2)


def test_copies_that_do_not_divide_the_logical_shards_make_no_layout() -> None:
    assert with_dp(Layout(dp=2), 3, num_shards=4) is None
    assert with_dp(Layout(dp=2), 8, num_shards=4) is None
    assert with_dp(Layout(dp=2), 4, num_shards=4) == Layout(dp=4)


MOST: dict[str, tuple[Layout, int, int | None, int | None, int]] = {
    "what makes no whole copy is left out": (Layout(tp=2), 7, None, None, 3),
    "no more than asked for": (Layout(tp=2), 7, 2, None, 2),
    "as far as the experts divide over them": (Layout(dp=2, ep=2), 5, None, None, 4),
    "as far as they divide the logical shards": (Layout(), 7, None, 4, 4),
    "none without a whole copy": (Layout(tp=4), 3, None, None, 0),
    "none where there is no layout": (Layout(dp=2, ep=2), 1, None, None, 0),
}
"""A layout, GPUs, the most copies, logical shards; copies."""


@pytest.mark.parametrize("name", MOST)
def test_the_most_copies_that_gpus_make(name: str) -> None:
    layout, num_gpus, most, num_shards, want = MOST[name]
    assert largest_dp(layout, num_gpus // replica_size(layout) if most is None else most, num_shards=num_shards) == want
    placed = most_copies(layout, gpus(0, num_gpus), most=most, num_shards=num_shards)
    if not want:
        assert placed is None
    else:
        assert placed == Placed(gpus(0, want * replica_size(layout)), replace(layout, dp=want))
