"""The search of the best fixed split: what it may know, and what it finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.policy.static import StaticPolicy
from simulator import best_split as searched
from simulator.best_split import BestSplit, Effort, Split, best_split, split_seconds, tuning_seeds, with_split
from simulator.iteration import SimulatedIteration
from simulator.policies import best_split_contender
from simulator.run import simulate
from simulator.scenario import Scenario, ScenarioError, parse_scenario
from tests.unit.simulator.scenarios import SMALL, small
from tidegate.types import Layout, PromptOrder, Role

LAYOUT = Layout(dp=2)


@pytest.fixture(scope="module")
def found() -> BestSplit:
    return best_split(small(), 3)


def test_the_same_scenario_and_seed_give_the_same_split(found: BestSplit) -> None:
    assert best_split(small(), 3) == found


@pytest.mark.parametrize("reported", [0, searched.LAST_SEED, searched.LAST_SEED - 2])
def test_the_search_never_draws_the_reported_lengths(reported: int) -> None:
    seeds = tuning_seeds(reported)
    assert reported not in seeds
    assert len(set(seeds)) == searched.NUM_TUNING


def test_the_split_does_not_depend_on_the_reported_lengths(found: BestSplit) -> None:
    assert best_split(small(), 4) == found


@pytest.mark.parametrize("order", PromptOrder)
def test_a_split_takes_as_long_as_under_static(order: PromptOrder) -> None:
    assert split_seconds(small(), order, 3) == simulate(small(), StaticPolicy(order), seed=3).iteration_s


def test_a_job_can_start_with_the_split(found: BestSplit) -> None:
    spec = SimulatedIteration(found.scenario, 3).spec
    assert sum(len(spec.placement[role].gpus) for role in Role) == 8
    assert found.scenario == parse_scenario(found.scenario.model_dump())
    contender = best_split_contender(small(), 3)
    assert simulate(contender.scenario, contender.policy, seed=3).num_lost == 0


def test_the_split_is_no_worse_than_the_configured_one_on_the_seeds_of_the_search(found: BestSplit) -> None:
    configured = [
        min(split_seconds(small(), order, seed) for order in (PromptOrder.AS_GIVEN, PromptOrder.SHORT_BETWEEN_LONG))
        for seed in found.seeds
    ]
    assert found.seconds <= sum(configured) / len(configured)


def test_no_split_of_a_small_cluster_is_better_by_a_hundredth(found: BestSplit) -> None:
    """All splits of eight GPUs, in all orders."""
    means = []
    for dp in range(1, 6):
        for num_inference in range(1, 7 - dp):
            for order in PromptOrder:
                scenario = with_split(small(), Split(Layout(dp=dp), num_inference, order))
                if scenario is not None:
                    means.append(sum(split_seconds(scenario, order, seed) for seed in found.seeds) / len(found.seeds))
    assert found.seconds <= 1.01 * min(means)


def test_a_fault_is_not_foreseen() -> None:
    lost = small(faults=[{"at_s": 1, "kind": "gpu", "gpu": 4}])
    assert replace(best_split(lost, 3), scenario=small()) == replace(best_split(small(), 3), scenario=small())


def test_a_trace_counts_by_its_moments(tmp_path: Path) -> None:
    """Two traces of the same moments, whose lengths are in another order."""
    rows = [" ".join(str(200 + 37 * ((5 * prompt + draw) % 23)) for draw in range(4)) for prompt in range(16)]

    def of(lines: list[str]) -> Scenario:
        (path := tmp_path / "lengths.txt").write_text("\n".join(lines))
        return small(lengths={"law": "trace", "file": str(path), "max_tokens": 4000})

    there, back = (best_split(of(lines), 3) for lines in (rows, rows[::-1]))
    assert (there.order, there.num_runs) == (back.order, back.num_runs)
    assert there.seconds == pytest.approx(back.seconds)
    assert there.scenario.placement() == back.scenario.placement()


def test_hints_that_tell_little_leave_the_order() -> None:
    lengths = {"median_tokens": 800, "max_tokens": 4000, "hint_sigma": 0.6}
    assert best_split(small(lengths=lengths), 3).order is PromptOrder.AS_GIVEN


def test_a_reproducible_actor_gets_a_legal_number_of_copies() -> None:
    split = best_split(small(actor_num_logical_shards=4), 3)
    layout = split.scenario.placement().layout
    assert layout is not None
    assert 4 % layout.dp == 0


@pytest.mark.parametrize(
    "split",
    {
        "no engine": Split(Layout(dp=4), 3, PromptOrder.AS_GIVEN),
        "no inference": Split(Layout(dp=4), 0, PromptOrder.AS_GIVEN),
        "too many copies": Split(Layout(dp=16), 2, PromptOrder.AS_GIVEN),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_split_that_leaves_a_component_without_gpus_is_none(split: tuple[str, Split]) -> None:
    assert with_split(small(), split[1]) is None


def test_a_component_without_gpus_is_refused_before_the_search() -> None:
    cluster: dict[str, Any] = {"nodes": {"n0": 8}, "placement": {"actor": "0-1", "rollout": "2-5"}}
    with pytest.raises(ScenarioError, match="inference has no GPUs"):
        best_split(parse_scenario(SMALL | {"cluster": cluster}))


def test_a_coarse_search_around_a_split_takes_fewer_runs_and_is_no_worse_than_it(found: BestSplit) -> None:
    effort = Effort(num_seeds=1, last_step_share=1 / 4)
    near = best_split(small(), 3, effort=effort, near=found.split)
    assert near.num_runs < found.num_runs
    assert near.seconds <= split_seconds(found.scenario, found.order, near.seeds[0])


def test_a_split_that_a_job_does_not_allow_is_not_found(found: BestSplit) -> None:
    def others(scenario: Scenario) -> bool:
        return scenario.placement() != found.scenario.placement()

    assert best_split(small(), 3, is_legal=others).scenario.placement() != found.scenario.placement()


def test_every_split_has_room_for_the_model() -> None:
    """32 GPUs hold 32B at TP 4, and 8 do not."""
    raw = {
        "cluster": {"nodes": {"n0": 64}, "placement": {"actor": "0-31", "rollout": "32-55", "inference": "56-63"}},
        "actor_layout": {"tp": 4, "dp": 8},
        "physics": {"law": "roofline", "model": "Qwen2.5-32B"},
    }
    scenario = parse_scenario(raw)
    assert with_split(scenario, Split(Layout(tp=4, dp=8), 8, PromptOrder.AS_GIVEN)) is not None
    assert with_split(scenario, Split(Layout(tp=4, dp=2), 8, PromptOrder.AS_GIVEN)) is None
