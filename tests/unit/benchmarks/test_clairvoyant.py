"""The best schedule that the search finds for an iteration with known lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.clairvoyant.orders import Keys, Order, sequences_in
from benchmarks.clairvoyant.policy_schedules import as_schedule
from benchmarks.clairvoyant.schedules import Schedule, run_schedule
from benchmarks.clairvoyant.search import Found, best_candidates, clairvoyant_schedule
from benchmarks.direct import simulate
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.opening_order import short_between_long
from services.scheduler.policy.situation import Situation
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.remembered import Remembered, as_configured
from simulator.iteration import SimulatedIteration
from simulator.policies import Contender
from simulator.scenario import load_scenario, parse_scenario
from tests import effort

SMALL = parse_scenario(
    {
        "physics": {"law": "published_fit"},
        "cluster": {"nodes": {"n0": 4}, "placement": {"actor": "0", "rollout": "1-2", "inference": "3"}},
        "algorithm": {"prompts_per_iteration": 6, "group_size": 2, "n_minibatches": 2},
        "lengths": {"median_tokens": 800, "max_tokens": 4000},
        "costs": {
            "engine": {"gpus_per_engine": 1, "max_running": 8},
            "trainer": {"rate_gpus": 4, "rate_tokens_per_s": 2000, "fixed_s": 1.0},
        },
    }
)


PUBLISHED = load_scenario(Path(__file__).parents[3] / "examples/scenarios/published_64gpu.yaml")
OTHERS = {"dynarl": Contender(SMALL, DynaRLPolicy(DynaRLRules()))}


def test_an_order_by_hints_knows_no_length() -> None:
    keys = Keys.of(SimulatedIteration(SMALL, 1).workload, by_hints=True)
    assert len({sequences_in(Order(key=key, share=0.5), keys) for key in range(3)}) == 1
    by_slack = sequences_in(Order(pace=4.0), keys)
    for prompt in range(6):
        members = [sequence for sequence in by_slack if sequence // 2 == prompt]
        assert members == sorted(members)


@pytest.mark.long
def test_the_search_finds_a_schedule_within_half_a_percent_of_the_best_on_a_small_cluster() -> None:
    found = clairvoyant_schedule(SMALL, seed=1, evaluations=80)
    simulated = SimulatedIteration(SMALL, 1)
    sizes = [(trainer, inference) for trainer in (1, 2, 3) for inference in (1, 2, 3) if trainer + inference <= 4]
    every = (
        Schedule(start_s, (one[0], two[0]), (one[1], two[1]), found.schedule.order)
        for start_s, one, two in product((0.0, 4.0, 8.0), sizes, sizes)
    )
    want = min(run_schedule(simulated, each).now_s for each in every)
    assert found.seconds <= want * 1.005


@pytest.mark.parametrize("seed", effort.cases([0, 2], always=[2]))
def test_the_found_schedule_is_between_the_bound_and_the_schedules_of_policies(seed: int) -> None:
    """A schedule has no moves between two minibatches, such as those of `dynarl`. The search draws orders of sequences,
    so it may miss the order of `tide`, and what it gains."""
    simulated = SimulatedIteration(SMALL, seed)
    runs = [simulate(SMALL, policy, seed=seed, directly=True) for policy in (TidePolicy(), DynaRLPolicy(DynaRLRules()))]
    found = clairvoyant_schedule(SMALL, seed=seed, evaluations=30, others=OTHERS)
    assert runs[0].bound.bound_s <= found.seconds
    assert run_schedule(simulated, found.schedule).now_s == found.seconds
    assert found.seconds <= 1.005 * runs[0].iteration_s
    assert found.seconds <= 1.005 * min(run_schedule(simulated, as_schedule(run, simulated)).now_s for run in runs)


@pytest.mark.long
def test_the_same_seed_and_evaluations_give_the_same_schedule() -> None:
    assert clairvoyant_schedule(SMALL, seed=3, evaluations=13) == clairvoyant_schedule(SMALL, seed=3, evaluations=13)


@pytest.mark.long
def test_more_evaluations_find_a_shorter_schedule() -> None:
    few, more = (clairvoyant_schedule(SMALL, seed=3, evaluations=count).seconds for count in (13, 80))
    assert more < few


@pytest.mark.long
def test_a_policys_run_takes_about_as_long_when_it_is_repeated_as_a_schedule() -> None:
    run = simulate(PUBLISHED, TidePolicy(), seed=17, directly=True)
    simulated = SimulatedIteration(PUBLISHED, 17)
    schedule = as_schedule(run, simulated)
    prompts = short_between_long(opened(simulated), TideRules().short_share)
    members = tuple(prompt * 16 + member for prompt in prompts for member in range(16))
    assert run_schedule(simulated, replace(schedule, order=members)).now_s == pytest.approx(run.iteration_s, rel=0.04)


def opened(simulated: SimulatedIteration) -> Situation:
    return simulated.situations.situation(simulated.world(as_configured(simulated.spec)), Remembered())


def found_by(origin: str, seconds: float) -> Found:
    return Found(seconds, Schedule(0.0, (1,), (1,)), Order(), origin, 1)


def test_at_first_the_candidates_of_other_origins_are_kept_if_they_are_near_the_best() -> None:
    near, far = found_by("near", 105.0), found_by("far", 150.0)
    best = [found_by("best", 100.0 + nth) for nth in range(5)]
    assert best_candidates([*best, near, far], is_apart=True) == [*best[:2], near]
    assert best_candidates([*best, near, far], is_apart=False) == best[:4]


def test_fewer_evaluations_than_the_search_begins_with_are_refused() -> None:
    with pytest.raises(ValueError, match="evaluations=2"):
        clairvoyant_schedule(SMALL, evaluations=2)
