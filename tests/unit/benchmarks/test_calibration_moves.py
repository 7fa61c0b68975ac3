"""The comparison of the simulator with jobs whose GPUs move: what it simulates for a real run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.calibration_moves import Ran, case_of, known_s, words_of
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
