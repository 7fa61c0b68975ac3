"""Asynchronous trainings of several iterations, with a fixed split and balanced ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from services.scheduler.policy.balance import Split
from simulator.asynchrony.course import Asynchrony
from simulator.asynchrony.run import AsyncRun, simulate_async, sizes_of, split_of
from simulator.asynchrony.search import neighbours, num_tuned, steady_s, tuned_split
from simulator.gpus import Doing
from simulator.lengths import Lengths, draw_lengths
from simulator.scenario import Scenario, ScenarioError, parse_scenario
from tests.unit.simulator.async_scenarios import RAW


def scenario() -> Scenario:
    return parse_scenario(RAW)


def lengths(of: Scenario, *factors: float) -> list[Lengths]:
    """One iteration for each factor of the median."""
    sections = [of.lengths.model_copy(update={"median_tokens": of.lengths.median_tokens * each}) for each in factors]
    return [
        draw_lengths(section, num_prompts=16, group_size=4, rng=np.random.default_rng(seed))
        for seed, section in enumerate(sections)
    ]


def run(*factors: float, split: Split | None = None, balances: bool = False, staleness: int = 1) -> AsyncRun:
    own = scenario()
    rules = Asynchrony(staleness=staleness)
    return simulate_async(own, rules, lengths(own, *factors), split=split, balances=balances)


def test_the_same_run_again() -> None:
    assert run(1, 1, 2, balances=True) == run(1, 1, 2, balances=True)


def test_a_bad_split_is_balanced_and_the_training_is_faster() -> None:
    bad = Split(engines=2, copies=12, inference=2)
    fixed, moved = run(*[1.0] * 12, split=bad), run(*[1.0] * 12, split=bad, balances=True)
    assert [split for _, split in fixed.splits] == [bad]
    assert len(moved.splits) > 1
    assert moved.seconds < 0.8 * fixed.seconds
    assert sum(moved.staleness.values()) == sum(fixed.staleness.values()) == moved.num_tokens


def test_a_component_that_grows_keeps_all_that_it_has() -> None:
    moved = run(*[1.0] * 12, split=Split(engines=2, copies=12, inference=2), balances=True)
    first_engines = [gpu for gpu, spans in moved.timeline.items() if spans[0].state is Doing.GENERATING]
    assert len(first_engines) == 2
    shrinks_s = [at_s for (_, before), (at_s, split) in pairwise(moved.splits) if split.engines < before.engines]
    switching = [span for gpu in first_engines for span in moved.timeline[gpu] if span.state is Doing.SWITCHING]
    assert all(span.start_s >= min(shrinks_s) for span in switching)


def test_a_balanced_split_follows_responses_that_grow() -> None:
    factors = [0.25] * 6 + [3.0] * 12
    moved = run(*factors, split=Split(engines=4, copies=11, inference=1), balances=True)
    fixed = run(*factors, split=Split(engines=4, copies=11, inference=1))
    assert moved.seconds < 0.95 * fixed.seconds


def test_iterations_that_are_issued_at_once_move_nothing() -> None:
    """The rollout makes the tokens of both meanwhile, and the balance took them for those of one."""
    start = Split(engines=9, copies=6, inference=1)
    ahead = run(*[1.0] * 6, split=start, balances=True)
    second_ends_s = sum(ahead.iteration_s[:2])
    assert len(ahead.splits) > 1
    assert all(at_s >= second_ends_s for at_s, _ in ahead.splits[1:])
    strict = run(*[1.0] * 6, split=start, balances=True, staleness=0)
    assert strict.splits[1][0] < sum(strict.iteration_s[:2])


def test_the_balance_counts_the_prompts_that_trainer_and_inference_compute() -> None:
    """With prompts that are five times as long as responses, trainer and inference have six times the work."""
    own = parse_scenario({**RAW, "algorithm": {**RAW["algorithm"], "prompt_tokens": 2000}})
    drawn, rules, start = lengths(own, *[1.0] * 8), Asynchrony(staleness=1), Split(engines=3, copies=12, inference=1)
    fixed = simulate_async(own, rules, drawn, split=start)
    moved = simulate_async(own, rules, drawn, split=start, balances=True)
    assert moved.seconds < 1.05 * fixed.seconds


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_neighbour_of_the_tuned_split_is_faster_or_as_fast_with_more_engines(staleness: int) -> None:
    own, rules = scenario(), Asynchrony(staleness=staleness)
    drawn = lengths(own, *[1.0] * num_tuned(rules))

    def value(split: Split) -> tuple[float, int]:
        return steady_s(simulate_async(own, rules, drawn, split=split), rules), -split.engines

    found = tuned_split(own, rules, drawn)
    others = list(neighbours(found, sizes_of(own)))
    assert others
    assert all(value(found) <= value(each) for each in others)
    assert value(found) < value(split_of(own))
    assert tuned_split(own, rules, drawn, near=found) == found


@pytest.mark.parametrize("copies", [2, 6, 10])
@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_steady_seconds_are_those_of_a_longer_training(copies: int, staleness: int) -> None:
    split, rules = Split(engines=14 - copies, copies=copies, inference=2), Asynchrony(staleness=staleness)
    few, many = (run(*[1.0] * num, split=split, staleness=staleness) for num in (num_tuned(rules), 40))
    found, wanted = steady_s(few, rules) / sum(few.trained[staleness:-staleness]), many.seconds / sum(many.trained)
    assert found == pytest.approx(wanted, rel=0.06)
    assert sum(few.generated) == sum(few.trained)


def test_a_trainer_that_uses_up_what_was_made_at_the_start_is_no_faster_than_the_rollout() -> None:
    seconds, generated = (800.0, 300.0, 300.0, 300.0, 300.0, 500.0), (20, 8, 7, 8, 7, 10)
    uses_up = replace(run(1.0), iteration_s=seconds, trained=(10,) * 6, generated=generated)
    assert steady_s(uses_up, Asynchrony(staleness=1)) == 1200 * 40 / 30
    assert steady_s(uses_up, Asynchrony(staleness=0)) == 2500
    keeps_up = replace(uses_up, generated=(10,) * 6)
    assert steady_s(keeps_up, Asynchrony(staleness=1)) == 1200


def test_more_gpus_than_there_are_are_refused() -> None:
    with pytest.raises(
        ScenarioError, match="10 engines, 8 copies, 2 inference GPUs are 20 GPUs, and the cluster has 16"
    ):
        run(1.0, split=Split(engines=10, copies=8, inference=2))
