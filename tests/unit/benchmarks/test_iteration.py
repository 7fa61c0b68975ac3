"""The comparison of policies on real iterations: its job, its cases and its forecasts."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from benchmarks.iteration import Measured, cases_of, config_of, forecast_s, ratios, true_scenario
from services.actor.settings import limits_of
from tidegate.job import load_job
from tidegate.length_law import drawn_length
from tidegate.pace.costs import SYNC_S
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


def test_the_forecast_has_the_prompts_the_sync_and_the_micro_batches_of_the_job(tmp_path: Path) -> None:
    config = config_of(())
    job, scenario = load_job(config), true_scenario(config, 0, tmp_path)
    assert job.task is not None
    prompts = range(config.algorithm.prompts_per_iteration * config.algorithm.iterations)
    counts = {len(job.tokenizer.encode_prompt(job.task.prompt(number).text)) for number in prompts}
    assert counts == {scenario.algorithm.prompt_tokens}
    assert scenario.costs.sync.sync_s == SYNC_S
    assert scenario.workload(0).limits == limits_of(config.actor, job.model)


@pytest.mark.long
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
