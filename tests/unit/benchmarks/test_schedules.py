"""Iterations by a fixed schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.clairvoyant.policy_schedules import as_schedule
from benchmarks.clairvoyant.schedules import Schedule, run_schedule
from benchmarks.direct import simulate
from services.scheduler.policy import Policy
from services.scheduler.policy.fused import FusedPolicy
from services.scheduler.policy.phases import PhasesPolicy
from simulator.happenings import What
from simulator.iteration import SimulatedIteration
from simulator.scenario import parse_scenario
from simulator.world import World

GPUS = 12
SMALL = parse_scenario(
    {
        "physics": {"law": "published_fit"},
        "cluster": {"nodes": {"n0": GPUS}, "placement": {"actor": "0-1", "rollout": "2-9", "inference": "10-11"}},
        "actor_layout": {"tp": 2},
        "algorithm": {"prompts_per_iteration": 24, "group_size": 4, "n_minibatches": 3},
        "lengths": {"median_tokens": 800, "max_tokens": 4000},
        "costs": {
            "engine": {"gpus_per_engine": 2, "max_running": 8},
            "trainer": {"rate_gpus": GPUS, "rate_tokens_per_s": 6000, "fixed_s": 4.0},
        },
    }
)
SIMULATED = SimulatedIteration(SMALL, 1)
PLAIN = Schedule(10.0, (2, 4, 8), (2, 2, 1))


def when(world: World, what: What) -> list[float]:
    return [each.at_s for each in world.history if each.what is what]


def trainers(world: World) -> list[int]:
    return [len(each.gpus) for each in world.history if each.what is What.TRAINER_RESIZED]


def test_the_trainer_gets_its_first_gpus_at_the_start_and_the_next_ones_between_minibatches() -> None:
    world = run_schedule(SIMULATED, PLAIN)
    switch = SMALL.costs.switch
    assert trainers(world)[:3] == [2, 4, 8]
    assert when(world, What.TRAINER_RESIZED)[0] == pytest.approx(10.0 + switch.release_s + switch.trainer_warm_s)
    ends, resized = when(world, What.MINIBATCH_FINISHED), when(world, What.TRAINER_RESIZED)
    # Engines leave so early that their GPUs are free at the end of each minibatch.
    assert [at_s - end_s for at_s, end_s in zip(resized[1:3], ends, strict=False)] == pytest.approx(
        [switch.reshard_s] * 2
    )


def test_a_trainer_with_gpus_from_the_start_begins_without_a_switch() -> None:
    world = run_schedule(SIMULATED, replace(PLAIN, start_s=0.0, trainer=(2, 2, 2)))
    assert when(world, What.MINIBATCH_STARTED)[0] == when(world, What.GROUP_INFERRED)[0]


def test_a_start_after_the_rollout_gives_the_rollout_of_collocated_phases() -> None:
    world = run_schedule(SIMULATED, Schedule(1e6, (GPUS,) * 3, (GPUS,) * 3))
    want = simulate(SMALL, PhasesPolicy(), seed=1, directly=True)
    rollout_s = next(each.at_s for each in want.history if each.what is What.ROLLOUT_FINISHED)
    assert when(world, What.ROLLOUT_FINISHED) == [rollout_s]


def test_the_inference_gets_its_first_gpus_ahead_of_the_trainer() -> None:
    world = run_schedule(SIMULATED, replace(PLAIN, start_s=25.0, infer_s=10.0))
    resized = [each for each in world.history if each.what is What.INFERENCE_RESIZED and each.gpus]
    assert len(resized[0].gpus) == 2
    assert 10.0 < resized[0].at_s < 25.0 < when(world, What.TRAINER_RESIZED)[0]


@pytest.mark.parametrize("policy", [PhasesPolicy(), FusedPolicy()], ids=lambda policy: type(policy).__name__)
def test_phases_take_as_long_when_they_are_repeated_as_a_schedule(policy: Policy) -> None:
    run = simulate(SMALL, policy, seed=1, directly=True)
    assert run_schedule(SIMULATED, as_schedule(run, SIMULATED)).now_s == pytest.approx(run.iteration_s, abs=0.1)


def test_the_trainer_has_no_fewer_copies_than_have_room() -> None:
    spec = replace(SIMULATED.spec, fewest_actor_copies=3)
    simulated = SimulatedIteration(SMALL, 1, spec=spec)
    assert min(trainers(run_schedule(simulated, PLAIN))) == 6


@pytest.mark.parametrize("lends", [False, True])
def test_a_minibatch_waits_until_the_scheduled_share_of_its_groups_is_ready(lends: bool) -> None:
    world = run_schedule(SIMULATED, replace(PLAIN, waits=(0.0, 0.0, 1.0), lends=(False, False, lends)))
    third = when(world, What.MINIBATCH_STARTED)[2]
    assert third >= when(world, What.GROUP_INFERRED)[23]
    assert run_schedule(SIMULATED, PLAIN).now_s != world.now_s
    had_none = 0 in trainers(world)[: trainers(world).index(4) + 2]
    assert had_none == lends


def test_the_gpus_of_the_inference_change_within_a_minibatch() -> None:
    world = run_schedule(SIMULATED, replace(PLAIN, inference=(2, 4, 2, 4, 2, 4)))
    first, second = when(world, What.MINIBATCH_FINISHED)[:2]
    resized = [each for each in world.history if each.what is What.INFERENCE_RESIZED]
    sizes = [len(each.gpus) for each in resized if first < each.at_s < second]
    assert 4 in sizes


def test_sequences_begin_in_the_schedules_order() -> None:
    backwards = tuple(range(24 * 4))[::-1]
    first = run_schedule(SIMULATED, replace(PLAIN, order=backwards)).history[0]
    slots = GPUS // 2 * 8
    assert first.what is What.SEQUENCE_FINISHED
    assert first.number >= 24 * 4 - slots


sizes = st.integers(1, 2 * GPUS)


@given(
    start_s=st.floats(0, 200),
    trainer=st.tuples(sizes, sizes, sizes),
    inference=st.tuples(*[sizes] * 6),
    waits=st.tuples(*[st.floats(0, 1)] * 3),
    lends=st.tuples(*[st.booleans()] * 3),
    soonest_back=st.booleans(),
    infer_s=st.none() | st.floats(0, 200),
)
def test_any_schedule_ends_with_every_sample_trained_once_and_not_below_the_bound(
    start_s: float,
    trainer: tuple[int, ...],
    inference: tuple[int, ...],
    waits: tuple[float, ...],
    lends: tuple[bool, ...],
    soonest_back: bool,
    infer_s: float | None,
) -> None:
    schedule = Schedule(start_s, trainer, inference, (), waits, lends, soonest_back, infer_s)
    world = run_schedule(SIMULATED, schedule)
    assert sorted(world.trainer.trained) == list(range(24))
    run = SIMULATED.run_of(world, policy="", decisions=[])
    assert run.bound.bound_s <= run.iteration_s
