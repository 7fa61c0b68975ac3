"""The grid of physics of `benchmarks.iteration_sim`: its cells, its cases and its figures."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks.clairvoyant.search import clairvoyant_schedule
from benchmarks.contenders import COMPARED, ROOFLINE, contenders
from benchmarks.direct import simulate
from benchmarks.iteration_grid import BASE, CELLS, FIRST_SEED, MODEL_32B, Cell, case_of, figures_of
from benchmarks.iteration_sim import beside_clairvoyant, published_figures
from services.scheduler.policy.tide.tide_policy import TidePolicy
from simulator.scenario import ScenarioError, load_scenario
from tests import effort
from tests.unit.benchmarks.small_iteration import SMALL
from tidegate.types import MinibatchOrder


def test_every_cell_has_room_and_is_another_iteration() -> None:
    scenarios = [cell.scenario() for cell in CELLS]
    assert all(scenario.is_computed for scenario in scenarios)
    assert len({scenario.model_dump_json() for scenario in scenarios}) == len(CELLS)
    assert scenarios[0] == load_scenario(ROOFLINE)


def test_each_cell_has_seeds_of_its_own() -> None:
    seeds = list(itertools.chain.from_iterable(cell.seeds for cell in CELLS))
    assert len(seeds) == len(set(seeds))
    assert min(seeds) == FIRST_SEED


def test_the_cells_of_the_fixed_order_are_marked() -> None:
    for cell in CELLS:
        assert cell.is_fixed == (cell.scenario().algorithm.minibatch_order is MinibatchOrder.FIXED)


def test_a_cell_whose_trainer_has_no_room_is_refused_with_the_numbers() -> None:
    alone = Cell("32B in one copy", (*MODEL_32B, "actor_layout.dp=1", "cluster.placement.actor=0-7"), (1,))
    with pytest.raises(ScenarioError, match=r"no room for the model.* GB"):
        alone.scenario()


def test_a_cell_whose_engine_has_no_room_is_refused() -> None:
    with pytest.raises(ScenarioError, match="engine"):
        Cell("32B on one GPU", (*MODEL_32B, "costs.engine.gpus_per_engine=1"), (1,)).scenario()


@pytest.mark.long
def test_a_case_has_the_seconds_of_all_and_each_ratio_by_seed() -> None:
    cell = Cell("small", SMALL, (1, 2))
    case = case_of(cell, (1, 2), contenders(cell.scenario()))
    assert {f"{name}_s" for name in COMPARED} <= case.keys()
    others = [case["by_seed_s"][name] for name in COMPARED if name not in ("tide", "planned_once")]
    want = [min(each) / own for own, each in zip(case["by_seed_s"]["tide"], zip(*others, strict=True), strict=True)]
    assert case["tide_vs_best_other"] == pytest.approx(want)
    assert case["best_other"] in COMPARED
    assert all(each >= own for each, own in zip(case["bound_vs_best_other"], case["tide_vs_best_other"], strict=True))
    assert "best of" in case["split"]


def cell_case(name: str, values: list[float], *, is_fixed: bool = False) -> dict[str, object]:
    return {"case": name, "is_fixed": is_fixed, "tide_vs_best_other": values}


def test_figures_are_medians_over_cells_and_the_worst_cell_is_of_the_whole_grid() -> None:
    cases = [
        cell_case("base", [1.0, 1.1, 1.2]),
        cell_case("slow", [1.3, 1.5]),
        cell_case("fast", [0.9, 1.1]),
        cell_case("fixed", [0.95, 0.97], is_fixed=True),
    ]
    found = figures_of(cases)
    assert found["tide_vs_best_other"] == pytest.approx(1.1)
    assert (found["tide_vs_best_other_min"], found["tide_vs_best_other_max"]) == (0.9, 1.5)
    assert found["tide_vs_best_other_fixed"] == pytest.approx(0.96)
    assert found["worst_cell_vs_best_other"] == pytest.approx(0.96)


def test_figures_without_a_fixed_cell_have_none_of_it() -> None:
    assert "tide_vs_best_other_fixed" not in figures_of([cell_case("base", [1.0])])


def test_the_base_cell_is_compared_with_the_best_schedule_of_each_seed() -> None:
    seconds = {name: [110.0, 240.0] for name in COMPARED}
    figures = beside_clairvoyant({"by_seed_s": seconds}, [100.0, 200.0])
    assert figures["tide_over_clairvoyant"] == pytest.approx(1.15)
    assert figures["phases_ordered_over_clairvoyant_max"] == pytest.approx(1.2)


def test_a_policy_that_ends_sooner_than_the_search_is_the_best_schedule() -> None:
    seconds = {name: [110.0] for name in COMPARED} | {"fused": [80.0]}
    assert beside_clairvoyant({"by_seed_s": seconds}, [100.0])["tide_over_clairvoyant"] == pytest.approx(110 / 80)


def test_the_published_iteration_is_compared_with_what_was_published() -> None:
    seconds = dict.fromkeys(COMPARED, 985.0) | {"tide": 600.0, "bound": 500.0, "dynarl": 985 / 1.34}
    figures = published_figures([{**seconds, "clairvoyant": 580.0}, seconds])
    assert figures["static_off_published"] == pytest.approx(0)
    assert figures["dynarl_off_published"] == pytest.approx(0)
    assert figures["dynarl_priority_off_published"] == pytest.approx(1 - 1 / 1.46)
    assert figures["published_tide_over_clairvoyant"] == pytest.approx(600 / 580)


@pytest.mark.parametrize("order", effort.cases(["arrival", "fixed"], always=["arrival"]))
def test_the_clairvoyant_search_runs_on_computed_physics(order: str) -> None:
    scenario = dataclasses.replace(BASE, overrides=(*SMALL, f"algorithm.minibatch_order={order}")).scenario()
    run = simulate(scenario, TidePolicy(), seed=1, directly=True)
    found = clairvoyant_schedule(scenario, seed=1, evaluations=30)
    assert run.bound.bound_s <= found.seconds <= 1.05 * run.iteration_s
