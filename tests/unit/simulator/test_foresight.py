"""The forecasts of `tide` against the times of a simulated iteration with known lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.clairvoyant.schedules import Schedule, run_schedule
from benchmarks.contenders import ROOFLINE
from benchmarks.wrong_rates import Wrong
from services.scheduler.policy.lengths_law import final_lengths
from services.scheduler.policy.opening_order import longest_first, short_between_long
from services.scheduler.policy.situation import Situation
from services.scheduler.policy.tide.cluster import Plans, cluster_of, gpus_there
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.policy.tide.foresight import DOUBTED_RATE, Foresight, TideRules, believed
from services.scheduler.policy.tide.memory import TideMemory
from services.scheduler.policy.tide.outlook import outlook
from services.scheduler.policy.tide.plans import (
    BEGINNINGS,
    Found,
    best_of,
    earliest_start_s,
    family,
    legal,
    neighbours,
    not_before,
    search,
)
from services.scheduler.policy.tide.prompt_order import queue_in
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.observed import Ints, TrainerRate
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from simulator.iteration import SimulatedIteration
from simulator.run import simulate
from simulator.scenario import Scenario, load_scenario
from tests import effort
from tidegate.types import GpuId, Layout

PUBLISHED = load_scenario(Path(__file__).parents[3] / "examples/scenarios/published_64gpu.yaml")
SYNC_S = PUBLISHED.costs.sync.sync_s
PLANS = {
    "early, with a small trainer": (50.0, (12, 20, 44, 56), (4, 4, 6, 6)),
    "later": (80.0, (12, 28, 44, 52), (4, 6, 6, 6)),
    "late, with a larger one": (100.0, (20, 24, 40, 52), (6, 8, 8, 6)),
}
LATE = {"early, with a small trainer": 0.13, "later": 0.07, "late, with a larger one": 0.02}
"""The forecast's lateness: at most 0.122, 0.068 and 0.009 over the seeds 0 to 4. It takes inference for never behind
again once it has caught up, which an early start does not bear out."""
MOST_LATE = {"early, with a small trainer": 0.13, "later": 0.08, "late, with a larger one": 0.11}
"""The same for a trainer that does not stream: at most 0.122, 0.073 and 0.1."""


def opened(scenario: Scenario, seed: int) -> tuple[Situation, SimulatedIteration]:
    """The beginning of an iteration with all GPUs in the rollout."""
    simulated = SimulatedIteration(scenario, seed)
    at_home = simulated.situations.situation(simulated.world(as_configured(simulated.spec)), Remembered())
    world = simulated.world(TidePolicy().choose(at_home).assignment)
    return simulated.situations.situation(world, Remembered()), simulated


def forecast(
    situation: Situation,
    simulated: SimulatedIteration,
    order: tuple[int, ...],
    assigned: Assignment | None = None,
) -> Forecast:
    """With known lengths. `assigned`: None: as `tide` opens."""
    lengths = np.array([float(sum(turns)) for row in simulated.workload.lengths.turns for turns in row])
    assigned = assigned or TidePolicy().choose(situation).assignment
    cluster = cluster_of(situation, assigned, gpus_there(situation))
    num_slots = cluster.num_engines * cluster.max_running
    left = outlook(situation, lengths, num_slots=num_slots, waiting=queue_in(situation, order))
    return Forecast(left, cluster, situation.costs)


@pytest.mark.parametrize("name", PLANS)
def test_the_end_is_forecast_from_the_start_and_not_early(name: str) -> None:
    found_s, want_s = ends_s(PUBLISHED, PLANS[name])
    assert 0.99 * want_s <= found_s <= want_s * (1 + LATE[name])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_plan_that_starts_the_trainer_ends_as_forecast_within_seven_percent(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True lengths are not known. Many sequences wait, and the plan leaves the rollout few engines."""
    policy, made, own = TidePolicy(), list[tuple[float, float]](), Foresight.plan

    def plan(
        foresight: Foresight,
        situation: Situation,
        assigned: Assignment,
        memory: TideMemory,
        there: tuple[GpuId, ...],
        *,
        is_move: bool,
        order: tuple[int, ...] = (),
    ) -> Found:
        found = own(foresight, situation, assigned, memory, there, is_move=is_move, order=order)
        if is_move and situation.now_ms and not made and found.plan.start_s[0] == 0:
            made.append((situation.now_ms / 1000, found.end_s))
            object.__setattr__(policy, "revises", False)
        return found

    monkeypatch.setattr(Foresight, "plan", plan)
    scenario = load_scenario(ROOFLINE)
    want_s = simulate(scenario, policy, seed=seed).iteration_s - SimulatedIteration(scenario, seed).costs.sync.sync_s
    ((now_s, rest_s),) = made
    assert rest_s == pytest.approx(want_s - now_s, rel=0.07)


@pytest.mark.parametrize("name", effort.cases(PLANS, always=["later"]))
def test_the_end_of_a_trainer_that_does_not_stream_is_forecast_late_and_by_little(name: str) -> None:
    """It also gets the GPUs of an ended rollout while it waits for its last minibatch, so its forecast is late."""
    found_s, want_s = ends_s(of(streams=False), PLANS[name])
    assert want_s <= found_s <= want_s * (1 + MOST_LATE[name])
    assert want_s > 1.1 * ends_s(PUBLISHED, PLANS[name])[1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_end_of_an_iteration_that_stays_at_home_is_forecast_within_two_percent(seed: int) -> None:
    """A short one: no sequence waits for a slot."""
    short = of(prompts_per_iteration=128)
    simulated, stays = SimulatedIteration(short, seed), TidePolicy(TideRules(least_gain_s=1e6))
    home = as_configured(simulated.spec)
    situation = simulated.situations.situation(simulated.world(home), Remembered())
    own = forecast(situation, simulated, stays.choose(situation).group_order, assigned=home)
    own = replace(own, cluster=replace(own.cluster, is_open=True))
    want_s = simulate(short, stays, seed=seed).iteration_s - SYNC_S
    assert own.stays_s(3) == pytest.approx(want_s, rel=0.02)
    without_trainer = replace(own, cluster=replace(own.cluster, num_trainer_gpus=0))
    assert without_trainer.stays_s(3) == math.inf


def ends_s(
    scenario: Scenario, plan: tuple[float, tuple[int, ...], tuple[int, ...]], *, seed: int = 1
) -> tuple[float, float]:
    """The forecast end of a plan, and the one that the simulator finds."""
    start_s, trainer, inference = plan
    situation, simulated = opened(scenario, seed)
    order = short_between_long(situation, 0.25)
    size = situation.spec.group_size
    members = tuple(prompt * size + member for prompt in order for member in range(size))
    plans = Plans(np.array([start_s]), np.array([trainer]), np.array([inference]))
    (found,) = forecast(situation, simulated, order).ends_s(plans)
    world = run_schedule(simulated, Schedule(start_s, trainer, inference, members))
    return float(found), world.now_s - simulated.costs.sync.sync_s


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_early_plan_that_leaves_the_rollout_few_engines_is_forecast_within_five_percent(seed: int) -> None:
    """On the roofline's law a step takes longer the more KV tokens there are. It is 1 to 3 % late."""
    found_s, want_s = ends_s(load_scenario(ROOFLINE), (26.0, (28, 40, 44, 44), (10, 10, 10, 10)), seed=seed)
    assert found_s == pytest.approx(want_s, rel=0.05)


def test_the_forecast_of_a_plan_is_the_same_alone_and_among_others() -> None:
    situation, simulated = opened(PUBLISHED, 2)
    seen = forecast(situation, simulated, short_between_long(situation, 0.25))
    plans = family(seen.cluster, 4, seen.span_s)
    alone = [seen.ends_s(plans.row(at))[0] for at in range(plans.count)]
    assert pytest.approx(np.array(alone)) == seen.ends_s(plans)


@pytest.mark.parametrize("algorithm", [{}, {"minibatch_order": "fixed"}, {"streams": False}], ids=str)
def test_plans_that_begin_alike_end_as_with_a_row_of_their_own_to_the_last_bit(
    algorithm: dict[str, int | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    situation, simulated = opened(of(**algorithm), 2)
    seen = forecast(situation, simulated, longest_first(situation))
    coarse = family(seen.cluster, 4, seen.span_s, infers_ahead=seen.infers_ahead)
    around = neighbours(coarse.row(0), seen.cluster, seen.span_s, infers_ahead=seen.infers_ahead)
    plans = Plans.of(coarse, around)
    together = seen.ends_s(plans)

    def none_is_alike(*keys: Sequence[float]) -> tuple[Ints, Ints]:
        rows = np.arange(len(keys[0]))
        return rows, rows

    monkeypatch.setattr("services.scheduler.policy.tide.forecast.alike", none_is_alike)
    assert seen.ends_s(plans).tolist() == together.tolist()


def test_in_a_fixed_order_a_plan_whose_inference_starts_first_is_forecast_as_it_is_alone() -> None:
    situation, simulated = opened(of(minibatch_order="fixed"), 2)
    seen = forecast(situation, simulated, longest_first(situation))
    assert seen.infers_ahead
    plans = family(seen.cluster, 4, seen.span_s, infers_ahead=True)
    assert (plans.infers_s < plans.start_s).any()
    alone = [seen.ends_s(plans.row(at))[0] for at in range(plans.count)]
    assert pytest.approx(np.array(alone)) == seen.ends_s(plans)
    around = neighbours(plans.row(plans.count - 1), seen.cluster, seen.span_s, infers_ahead=True)
    assert (around.infers_s <= around.start_s).all()
    assert np.unique(around.infers_s).size > 1


def of(**algorithm: int | str) -> Scenario:
    """The published scenario with changes of its algorithm."""
    own = PUBLISHED.model_dump()
    return Scenario.model_validate(own | {"algorithm": own["algorithm"] | algorithm})


def small(**changes: object) -> Scenario:
    own = PUBLISHED.model_dump()
    own["cluster"] = {"nodes": {"n0": 8}, "placement": {"actor": "0-1", "rollout": "2-5", "inference": "6-7"}}
    own["algorithm"] |= {"prompts_per_iteration": 32, "group_size": 8, "n_minibatches": 2}
    own["costs"]["engine"]["max_running"] = 32
    own["actor_layout"] = None
    return Scenario.model_validate(own | changes)


def test_the_search_finds_the_best_plan_of_a_small_cluster_within_half_a_percent() -> None:
    situation, simulated = opened(small(), 3)
    seen = forecast(situation, simulated, tuple(range(32)))
    found = search(seen, family(seen.cluster, 2, seen.span_s), rounds=30)
    sizes = [(trainer, inference) for trainer in range(1, 8) for inference in range(1, 8) if trainer + inference <= 8]
    every = [(start, one, two) for start in np.arange(0.0, 200.0, 8.0) for one in sizes for two in sizes]
    plans = Plans(
        np.array([row[0] for row in every]),
        np.array([[row[1][0], row[2][0]] for row in every]),
        np.array([[row[1][1], row[2][1]] for row in every]),
    )
    assert found.end_s <= best_of(seen, not_before(plans, earliest_start_s(seen))).end_s * 1.005


def test_a_search_finds_what_searches_from_the_best_plans_of_two_starts_find() -> None:
    """The second beginning ends sooner in one of these iterations."""
    best = []
    for seed in range(4):
        situation, simulated = opened(load_scenario(ROOFLINE), seed)
        own = forecast(situation, simulated, longest_first(situation))
        coarse = not_before(family(own.cluster, 4, own.span_s), earliest_start_s(own))
        ends_s = own.ends_s(coarse)
        by_start = [np.flatnonzero(coarse.start_s == start) for start in np.unique(coarse.start_s)]
        begins = sorted((int(rows[ends_s[rows].argmin()]) for rows in by_start), key=lambda row: float(ends_s[row]))
        apart = [search(own, coarse.row(row), rounds=4).end_s for row in begins[:BEGINNINGS]]
        assert search(own, coarse, rounds=4).end_s == min(apart)
        best.append(apart.index(min(apart)))
    assert len(set(best)) > 1


@pytest.mark.parametrize(("lent_s", "num"), [(5000.0, 1), (50.0, 0)])
def test_a_home_that_is_far_slower_than_lending_is_not_searched(
    lent_s: float, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated, policy = SimulatedIteration(small(), 3), TidePolicy()
    home = as_configured(simulated.spec)
    situation = simulated.situations.situation(simulated.world(home), Remembered())
    searched = list[int]()

    def counted(own: Forecast, begin: Plans, *, rounds: int) -> Found:
        searched.append(begin.count)
        return search(own, begin, rounds=rounds)

    monkeypatch.setattr("services.scheduler.policy.tide.foresight.search", counted)
    lent = Found(Plans(np.zeros(1), np.full((1, 2), 2), np.full((1, 2), 2)), lent_s)
    _, is_kept = Foresight(policy.rules).kept(situation, home, gpus_there(situation), lent)
    assert len(searched) == num
    assert is_kept == bool(num)


def test_every_neighbour_of_a_plan_is_legal_and_differs_from_it() -> None:
    situation, simulated = opened(PUBLISHED, 0)
    cluster = forecast(situation, simulated, tuple(range(512))).cluster
    plan = family(cluster, 4, 500.0).row(5)
    around = neighbours(plan, cluster, 500.0)
    again = legal(around, cluster)
    assert np.array_equal(again.trainer, around.trainer)
    assert np.array_equal(again.inference, around.inference)
    assert around.trainer.min() >= 4
    assert (around.trainer + around.inference).max() <= 64
    rows = {(*around.start_s[[at]], *around.trainer[at], *around.inference[at]) for at in range(around.count)}
    assert (*plan.start_s, *plan.trainer[0], *plan.inference[0]) not in rows


def test_the_told_rate_is_doubted_while_lengths_are_not_as_told_and_nothing_was_measured() -> None:
    situation, _ = opened(PUBLISHED, 0)
    cluster = cluster_of(situation, TidePolicy().choose(situation).assignment, gpus_there(situation))
    assert believed(situation, cluster) is cluster, "told right"
    wrong = Wrong(sigma=0.5).distorted(situation)
    assert wrong.law_in_force != wrong.lengths
    assert np.array_equal(believed(wrong, cluster).unit_rates, DOUBTED_RATE * cluster.unit_rates)
    training = replace(wrong.trainer.training, measured=(TrainerRate(Layout(tp=4), 1000.0),))
    measured = replace(wrong, trainer=replace(wrong.trainer, training=training))
    assert believed(measured, cluster) is cluster


def test_inference_gives_gpus_to_the_trainer_from_a_minibatch_on() -> None:
    situation, simulated = opened(PUBLISHED, 0)
    cluster = forecast(situation, simulated, tuple(range(512))).cluster
    plan = family(cluster, 4, 500.0).row(5)
    around = neighbours(plan, cluster, 500.0)
    given = {tuple(row) for row in (around.inference - plan.inference).tolist()}
    assert {(-4, -4, -4, -3), (0, -4, -4, -3), (4, 4, 4, 4)} <= given, "the last minibatch keeps one"


def test_the_forecast_number_of_tokens_at_the_start_is_right_within_three_percent() -> None:
    situation, simulated = opened(PUBLISHED, 0)
    assert final_lengths(situation.generation, situation.lengths).sum() == pytest.approx(
        simulated.workload.lengths.num_tokens, rel=0.03
    )
