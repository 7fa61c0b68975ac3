"""The comparison of the simulator with jobs whose GPUs move: what it simulates for a real run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.calibration_moves import Ran, case_of, known_s, report_of, words_of
from benchmarks.iteration import config_of, true_scenario

SMALL = ("algorithm.prompts_per_iteration=4", "algorithm.iterations=2")


def ran(policy: str, folder: Path) -> Ran:
    config = config_of([*words_of(policy, 7, SMALL), f"output_dir={folder}"])
    return Ran(config, seconds=(10.0, 20.0), num_moves=3, is_void=False)


def test_a_run_is_foreseen_with_its_own_lengths_and_its_own_policy(tmp_path: Path) -> None:
    static, tide = ran("static", tmp_path), ran("tide", tmp_path)
    scenario = true_scenario(static.config, 0, tmp_path)
    found = known_s(scenario, static, tmp_path)
    assert len(found) == 2
    assert found[0] != found[1], "the iterations have other lengths"
    assert known_s(scenario, tide, tmp_path) != found


def test_an_error_compares_medians(tmp_path: Path) -> None:
    run = ran("static", tmp_path)
    scenario = true_scenario(run.config, 0, tmp_path)
    case = case_of("static", scenario, [run, replace(run, seconds=(30.0,)), replace(run, seconds=(40.0,))])
    assert (case["real_median"], case["real_runs"], case["moves"]) == (30.0, 3, [3, 3, 3])
    assert case["error_of_lengths"] == pytest.approx(abs(case["simulated_of_lengths_median"] / 30.0 - 1))


def test_a_policy_whose_runs_are_all_void_is_reported_and_its_goal_is_missed(tmp_path: Path) -> None:
    run, void = ran("static", tmp_path), replace(ran("tide", tmp_path), is_void=True)
    scenario = true_scenario(run.config, 0, tmp_path)
    case = case_of("tide", scenario, [void, void])
    assert case == {"case": "tide", "moves": [3, 3], "void_runs": 2, "is_void": True}
    good = {"case": "static", "void_runs": 0, "is_void": False, "error": 0.1, "error_of_lengths": 0.1}
    report = report_of([good, case], run)
    assert report.figures == {"static_error": 0.1, "static_error_of_lengths": 0.1, "void_runs": 2}
    assert not report.is_met
    assert not replace(report, figures={**report.figures, "void_runs": 0}).is_met, "tide has no figure"
    assert report_of([good], run).is_met


def test_a_void_run_counts_in_no_figure(tmp_path: Path) -> None:
    run = ran("static", tmp_path)
    scenario = true_scenario(run.config, 0, tmp_path)
    case = case_of("static", scenario, [run, replace(run, seconds=(90.0,), is_void=True)])
    assert (case["real_median"], case["real_runs"], case["void_runs"], case["is_void"]) == (15.0, 1, 1, False)
