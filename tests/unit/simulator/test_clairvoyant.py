"""The searched schedule of an iteration whose lengths are known."""

from __future__ import annotations

from itertools import product

import pytest

from services.scheduler.policy.tide import TidePolicy
from simulator.clairvoyant import as_schedule, clairvoyant_schedule
from simulator.given import Given, Schedule
from simulator.run import simulate
from simulator.scenario import Scenario, parse_scenario

SMALL = parse_scenario(
    {
        "cluster": {"nodes": {"n0": 4}, "placement": {"actor": "0", "rollout": "1-2", "inference": "3"}},
        "algorithm": {"prompts_per_iteration": 6, "group_size": 2, "n_minibatches": 2},
        "lengths": {"median_tokens": 800, "max_tokens": 4000},
        "costs": {
            "engine": {"gpus_per_engine": 1, "max_running": 8},
            "trainer": {"rate_gpus": 4, "rate_tokens_per_s": 2000, "fixed_s": 1.0},
        },
    }
)


def test_it_is_within_two_percent_of_the_best_of_a_small_clusters_schedules() -> None:
    found = clairvoyant_schedule(SMALL, seed=1, evaluations=60)
    sizes = [(trainer, inference) for trainer in (1, 2, 3) for inference in (1, 2, 3) if trainer + inference <= 4]
    every = (
        Schedule(start_s, (one[0], two[0]), (one[1], two[1]), found.schedule.order)
        for start_s, one, two in product((0.0, 4.0, 8.0), sizes, sizes)
    )
    want = min(seconds(SMALL, each) for each in every)
    assert found.seconds <= want * 1.02


def seconds(scenario: Scenario, schedule: Schedule) -> float:
    return simulate(scenario, TidePolicy(planner=Given(schedule)), seed=1, directly=True).iteration_s


@pytest.mark.parametrize("seed", [0, 2])
def test_it_is_never_below_the_bound_and_no_worse_than_where_it_begins(seed: int) -> None:
    own = simulate(SMALL, TidePolicy(), seed=seed, directly=True)
    found = clairvoyant_schedule(SMALL, seed=seed, evaluations=20)
    assert own.bound.bound_s <= found.seconds
    again = simulate(SMALL, TidePolicy(planner=Given(found.schedule)), seed=seed, directly=True)
    assert again.iteration_s == found.seconds


def test_the_same_seed_and_evaluations_give_the_same_schedule() -> None:
    assert clairvoyant_schedule(SMALL, seed=3, evaluations=12) == clairvoyant_schedule(SMALL, seed=3, evaluations=12)


def test_more_evaluations_are_never_worse() -> None:
    few, more = (clairvoyant_schedule(SMALL, seed=4, evaluations=count).seconds for count in (8, 40))
    assert more <= few


def test_what_a_policy_did_is_told_by_minibatch() -> None:
    run = simulate(SMALL, TidePolicy(), seed=5, directly=True)
    schedule = as_schedule(run, 2)
    assert len(schedule.trainer) == len(schedule.inference) == 2
    assert 0 <= schedule.start_s < run.iteration_s


def test_fewer_evaluations_than_it_begins_with_are_refused() -> None:
    with pytest.raises(ValueError, match="evaluations=2"):
        clairvoyant_schedule(SMALL, evaluations=2)
