"""The figures of a fixed order, from made-up seconds."""

from __future__ import annotations

import json

import pytest

from benchmarks.fixed_order import OTHERS, case_of, figures_of
from benchmarks.iteration_grid import CELLS
from benchmarks.report import RESULTS


def test_figures_are_medians_of_medians_with_what_seeds_may_make_of_them() -> None:
    cell = CELLS[-1]
    rows = {
        seed: {"phases_ordered": 120.0, "fused": 130.0, "fused_ordered": 100.0 + seed, "tide": 100.0, "bound": 90.0}
        for seed in range(5)
    }
    cases = [case_of(cell, rows, {0: 99.0, 1: 105.0}), case_of(cell, rows, {0: 50.0})]
    assert cases[0]["tide_vs_best_other"] == [1.0, 1.01, 1.02, 1.03, 1.04]
    assert cases[0]["best_schedule_vs_best_other"] == [100 / 99, 1.01]
    assert cases[0]["tide_vs_best_other_there"] == [1.0, 1.01]
    figures = figures_of(cases)
    assert figures["tide_vs_best_other"] == 1.02
    assert 1.0 < figures["tide_vs_best_other_low"] < 1.02 < figures["tide_vs_best_other_high"] < 1.04
    assert figures["best_schedule_vs_best_other"] == pytest.approx(((100 / 99 + 1.01) / 2 + 2.0) / 2)
    without = figures_of([case_of(cell, rows, {})])
    assert "best_schedule_vs_best_other" not in without


def test_no_further_policy_was_the_fastest_other() -> None:
    """All that are compared on the seeds of `iteration_sim` are looked at."""
    saved = json.loads((RESULTS / "iteration_sim.json").read_text())
    fixed = [case for case in saved["cases"] if case.get("is_fixed")]
    assert fixed
    for case in fixed:
        others = {name: of for name, of in case["by_seed_s"].items() if name not in ("tide", "planned_once", "bound")}
        for at in range(len(case["seeds"])):
            assert min(of[at] for of in others.values()) == min(others[name][at] for name in OTHERS)
