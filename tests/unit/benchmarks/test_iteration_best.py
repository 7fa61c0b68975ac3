"""What the cells of the grid have of a search with the future."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.clairvoyant.orders import Order
from benchmarks.clairvoyant.schedules import Schedule
from benchmarks.clairvoyant.search import Found
from benchmarks.contenders import COMPARED
from benchmarks.iteration_best import (
    BY_HINTS,
    WEAK,
    best_by_hints,
    best_schedules,
    by_hints_figures,
    fastest_other,
    searched_case,
    worst_cell_best,
)
from benchmarks.iteration_grid import CELLS, Cell, figures_of
from tests.unit.benchmarks.small_iteration import SMALL

SECONDS = {**{name: [150.0, 160.0] for name in COMPARED}, "tide": [110.0, 120.0], "fused": [120.0, 115.0]}
CASE: dict[str, Any] = {"case": "a cell", "is_fixed": False, "seeds": [7, 8], "by_seed_s": SECONDS}


def found(seconds: float) -> Found:
    return Found(seconds, Schedule(0.0, (4,), (1,)), Order(), "tide", 1)


def test_the_fastest_other_is_chosen_on_each_seed() -> None:
    assert fastest_other(CASE, 0) == "fused"
    assert (
        fastest_other({"by_seed_s": {"tide": [1.0], "planned_once": [2.0], "rlinf": [3.0], "split": [4.0]}}, 0)
        == "rlinf"
    )


def test_ratios_of_the_best_schedules_are_on_the_same_seeds() -> None:
    got = best_schedules(CASE, {8: found(100.0)})
    assert got["best_schedule_seeds"] == [8]
    assert got["best_schedule_vs_tide"] == pytest.approx([1.2])
    assert got["best_schedule_vs_best_other"] == pytest.approx([1.15])
    assert got["best_schedule_vs_phases_ordered"] == pytest.approx([1.6])


def test_a_policy_that_ends_sooner_than_the_search_is_the_best_schedule_of_a_cell() -> None:
    got = best_schedules(CASE, {7: found(130.0), 8: found(130.0)})
    assert got["best_schedule_from"] == ["tide", "fused"]
    assert got["best_schedule_s"] == [110.0, 115.0]
    assert min(got["best_schedule_vs_best_other"]) == 1.0


def test_schedules_with_orders_by_hints_have_a_figure_of_their_own() -> None:
    case = CASE | best_by_hints(CASE, {7: 100.0, 8: 130.0})
    assert case["best_by_hints_s"] == [100.0, 115.0]
    assert case[BY_HINTS] == pytest.approx([1.2, 1.0])
    assert by_hints_figures([case, CASE])[f"{BY_HINTS}_fixed"] == pytest.approx(1.1)
    assert by_hints_figures([CASE | best_by_hints(CASE, {})]) == {}


def test_figures_have_the_best_schedules_beside_those_of_tide() -> None:
    cases: list[dict[str, Any]] = [
        CASE | {"tide_vs_best_other": [1.1, 0.96]} | best_schedules(CASE, {7: found(100.0)}),
        CASE | {"tide_vs_best_other": [0.9, 0.9], "is_fixed": True} | best_schedules(CASE, {8: found(80.0)}),
    ]
    figures = figures_of(cases)
    assert figures["best_schedule_vs_best_other"] == pytest.approx(1.2)
    assert figures["best_schedule_vs_best_other_fixed"] == pytest.approx(115 / 80)
    assert worst_cell_best(cases) == pytest.approx(115 / 80)


def test_the_weak_cells_are_in_the_grid() -> None:
    assert {cell.name for cell in CELLS} >= set(WEAK)


@pytest.mark.long
@pytest.mark.parametrize("order", ["arrival", "fixed"])
def test_a_searched_case_is_never_below_a_policy(order: str) -> None:
    cell = Cell("small", (*SMALL, f"algorithm.minibatch_order={order}"), (1, 2), is_fixed=order == "fixed")
    case = searched_case(cell, cell.seeds)
    assert case["best_schedule_seeds"] == ([1, 2] if cell.is_fixed else [1])
    assert min(case["best_schedule_vs_best_other"] + case["best_schedule_vs_tide"]) >= 1
    assert (BY_HINTS in case) == cell.is_fixed
