"""The comparison of policies on real iterations: its job, its cases and its forecasts."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from benchmarks.iteration import Measured, cases_of, config_of, forecast_s, ratios, true_scenario
from tidegate.length_law import drawn_length
from tidegate.types import SampleId


def test_the_forecast_has_the_lengths_that_the_job_draws_and_a_long_tail(tmp_path: Path) -> None:
    config = config_of(())
    law = config.rollout.length_law
    assert law is not None
    for iteration in range(config.algorithm.iterations):
        first = iteration * config.algorithm.prompts_per_iteration
        turns = true_scenario(config, iteration, tmp_path).workload(0).lengths.turns
        found = [[sum(member) for member in group] for group in turns]
        want = [
            [
                drawn_length(law, SampleId(2, iteration, prompt, draw), max_new_tokens=config.algorithm.max_new_tokens)
                for draw in range(config.algorithm.group_size)
            ]
            for prompt in range(first, first + config.algorithm.prompts_per_iteration)
        ]
        assert found == want
        every = [length for group in want for length in group]
        assert max(every) > 8 * mean(every)


def test_the_best_static_split_is_one_that_the_job_can_start_with_and_forecast_to_be_faster(tmp_path: Path) -> None:
    static, best, *moving = cases_of(config_of(()))
    assert [each.policy for each in (static, best)] == ["static", "static"]
    assert [each.name for each in moving] == ["rlinf", "dynarl", "tide"]
    config = config_of(best.words)
    assert forecast_s(config, 0, tmp_path) < forecast_s(config_of(()), 0, tmp_path)


def test_ratios_compare_the_whole_runs() -> None:
    def run(name: str, *seconds: float) -> Measured:
        return Measured(name, seconds, seconds, 100.0, {}, 0.0, is_void=False)

    found = ratios({"static": run("static", 10, 30), "tide": run("tide", 12, 8)}, prefix="fixed_")
    assert found == {"fixed_tide_over_static": pytest.approx(0.5)}
