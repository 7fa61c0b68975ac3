"""The comparison of whole trainings: its settings, its searches and its figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.training_sim import (
    GOALS,
    RATIOS,
    ROUGH,
    SETTINGS,
    async_case,
    case_of,
    figures_of,
    lossy_case,
    num_first,
    quarters,
    sampled,
    split_of,
    strict_case,
    strict_vs,
)
from benchmarks.training_splits import WINDOW, StrictTraining, async_following
from simulator.asynchrony.course import Asynchrony
from simulator.asynchrony.run import split_of as split_of_placement
from simulator.best_split import Split
from simulator.job_iterations import SimulatedJob
from simulator.scenario import Scenario, parse_scenario
from tests.unit.simulator.async_scenarios import RAW
from tidegate.types import Layout, PromptOrder

NUM = 8
USED_SEEDS = {*range(20), 40, 41, *range(100, 105), *range(200, 205), *range(300, 303), *range(400, 441)}


def small() -> Scenario:
    lengths = {**RAW["lengths"], "max_tokens": 8000}
    return parse_scenario({**RAW, "lengths": lengths, "drift": {"mean_tokens": {0: 300, NUM: 2000}}})


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_has_growing_lengths_and_seeds_that_nothing_was_tuned_on(setting: Any) -> None:
    assert not USED_SEEDS & set(setting.seeds)
    assert setting.scenario(200).is_computed == (setting.name != "published_fit")
    job = SimulatedJob(setting.scenario(20), 20, setting.seeds[0])
    first, last = (job.iteration(number).workload.lengths for number in (0, 19))
    assert last.num_tokens > 5 * first.num_tokens


def test_no_neighbour_of_the_best_split_is_faster() -> None:
    training = StrictTraining(small(), NUM, 7)
    found, numbers = training.best((0, 1)), (0, 1)
    others = list(training.neighbours(found))
    assert {each.order for each in others} == set(PromptOrder)
    assert {each.actor.dp - found.actor.dp for each in others} == {-1, 0, 1}
    assert all(training.sum_s(found, numbers) <= training.sum_s(each, numbers) for each in others)


def test_a_split_without_a_trainer_or_an_inference_is_no_neighbour() -> None:
    least = Split(Layout(dp=1), 1, PromptOrder.AS_GIVEN)
    found = [each for each in StrictTraining(small(), 1, 7).neighbours(least) if each.order is least.order]
    assert [(each.actor.dp, each.num_inference) for each in found] == [(1, 2), (2, 1)]


def test_splits_that_follow_are_no_slower_than_one_that_stays() -> None:
    scenario, numbers = small(), (1, NUM - 1)
    training = StrictTraining(scenario, NUM, 7)
    start = training.best((0,))
    assert training.following_s(start, numbers) <= training.sum_s(start, numbers)
    job = SimulatedJob(scenario, NUM, 7)
    lengths = [job.iteration(number).workload.lengths for number in range(NUM)]
    fixed_s, following_s = async_following(
        scenario, Asynchrony(), lengths, split_of_placement(scenario), (0, NUM - WINDOW)
    )
    assert following_s < fixed_s


def test_a_case_has_every_ratio() -> None:
    found = {part: case(small(), NUM, 7) for part, case in (("strict", strict_case), ("async", async_case))}
    both = strict_vs(found["strict"], found["async"])
    assert both["tide_vs_async_split"] == found["async"]["async_split_s"] / found["strict"]["tide_s"]
    figures = figures_of([found["strict"] | found["async"] | both], "a_")
    without_losses = {key for key in RATIOS if not key.startswith("losses")}
    assert figures.keys() == {f"a_{key}{end}" for key in without_losses for end in ("", "_min", "_max")}
    assert GOALS.keys() <= set(RATIOS)
    assert 0 < found["async"]["async_split_waiting_share"] < 1
    assert found["async"]["tide_async_splits"][0] == f"0: {found['async']['async_split']}"


def test_a_rough_training_filters_groups_begins_without_hints_and_loses_nodes() -> None:
    sizes = ("algorithm.prompts_per_iteration=32", "algorithm.group_size=4", "drift.epoch_prompts=64")
    own = replace(ROUGH, overrides=(*ROUGH.overrides, *sizes))
    job = SimulatedJob(own.scenario(NUM), NUM, 7)
    works = [job.iteration(number).workload for number in range(NUM)]
    assert [any(each.lengths.hints) for each in works] == [False, False, *[True] * (NUM - 2)]
    assert len(works[0].filtered) < len(works[-1].filtered)
    assert not own.scenario(NUM).faults
    start = "8/16/8 as_given"
    found = lossy_case(own, NUM, start, 7)
    split = split_of(start, own.scenario(NUM))
    whole_s = StrictTraining(own.scenario(NUM), NUM, 7).sum_s(split, range(NUM))
    assert found["losses_start_split_s"] > whole_s + 200
    assert found["losses_tide_vs_start_split"] == found["losses_start_split_s"] / found["losses_tide_s"]
    assert found["losses_num_restarts"].keys() == {"tide", "start_split"}


def test_ratios_are_those_of_the_sums() -> None:
    found = case_of({"tide": [1.0, 2.0, 3.0, 2.0], "other": [2.0, 4.0, 3.0, 3.0]})
    assert found["tide_vs_other"] == 1.5
    assert found["other_quarters_s"] == [2.0, 4.0, 3.0, 3.0]


def test_quarters_have_every_iteration_once() -> None:
    assert quarters(range(10)) == [0 + 1, 2 + 3 + 4, 5 + 6 + 7, 8 + 9]
    assert sum(quarters([1.0] * 7)) == 7


def test_the_sampled_iterations_are_evenly_spaced() -> None:
    assert list(sampled(200)) == [10, 30, 50, 70, 90, 110, 130, 150, 170, 190]
    assert list(sampled(NUM)) == [3]


def test_the_start_is_tuned_on_ten_iterations_or_a_quarter_of_a_short_job() -> None:
    assert [num_first(num) for num in (200, 20, 3)] == [10, 5, 1]
