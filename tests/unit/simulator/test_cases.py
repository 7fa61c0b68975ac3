"""The cases of physics of a plan."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest

from simulator.planning.cases import CASES, Case, in_case
from simulator.scenario import Scenario, load_scenario
from tidegate.types import Layout

SCENARIOS = Path("examples/scenarios")
CORNERS = [case for case in CASES if case.trainer != 1]


@pytest.fixture(params=["published_64gpu", "grpo_7b_64gpu"])
def scenario(request: pytest.FixtureRequest) -> Scenario:
    return load_scenario(SCENARIOS / f"{request.param}.yaml")


def test_each_pair_of_factors_has_all_four_combinations_in_the_corners() -> None:
    assert len(CORNERS) == 4
    for first, second in combinations(("trainer", "decode", "spread"), 2):
        assert len({(getattr(case, first), getattr(case, second)) for case in CORNERS}) == 4
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_assumed_case_changes_no_time(scenario: Scenario) -> None:
    same = in_case(scenario, CASES[0])
    assert same.laws().engine == scenario.laws().engine
    assert same.lengths == scenario.lengths


def test_a_case_changes_a_decode_step_by_its_factor(scenario: Scenario) -> None:
    slow = in_case(scenario, Case("slow", decode=0.7))
    for running in (1, 100):
        before, after = (
            each.laws().engine.decode_s(running=running, kv_tokens=1000 * running, steps=10)
            for each in (scenario, slow)
        )
        assert after == pytest.approx(before / 0.7)


def test_a_case_changes_the_trainers_rate_by_its_factor(scenario: Scenario) -> None:
    """The physics' transfers and launches do not change with the kernels."""
    fast = in_case(scenario, Case("fast", trainer=1.3))
    before, after = (each.laws().trainer.tokens_s(1e6, Layout(tp=4, dp=4)) for each in (scenario, fast))
    assert after == pytest.approx(before / 1.3, rel=0.1 if scenario.is_computed else 1e-9)


def test_another_spread_has_the_same_mean_before_the_cut(scenario: Scenario) -> None:
    def mean(own: Scenario) -> float:
        law = own.lengths
        return law.median_tokens * math.exp((law.sigma_prompt**2 + law.sigma_group**2) / 2)

    wide = in_case(scenario, Case("wide", spread=2.0))
    assert wide.lengths.sigma_prompt == 2 * scenario.lengths.sigma_prompt
    assert mean(wide) == pytest.approx(mean(scenario))


def test_a_case_changes_each_duration_of_a_move_by_its_factor(scenario: Scenario) -> None:
    dear = in_case(scenario, Case("dear", moves=3.0))
    before, after = scenario.laws().switch, dear.laws().switch
    for name in ("release_s", "acquire_s", "resubmit_s", "trainer_warm_s", "inference_warm_s"):
        assert getattr(after, name) == pytest.approx(3 * getattr(before, name)), name
    for moved_bytes in (None, 10**10):
        times = [each.resharding_s(moved_bytes, is_new=True) for each in (before, after)]
        assert times[1] == pytest.approx(3 * times[0])
    assert (after.trainer_cold_s, after.detect_s) == (before.trainer_cold_s, before.detect_s)


def test_hints_that_tell_nothing_and_noise_are_in_the_case_alone(scenario: Scenario) -> None:
    without, noisy = in_case(scenario, Case("none", has_hints=False)), in_case(scenario, Case("noise", noise=0.1))
    assert without.lengths.hint_sigma > 2 * without.lengths.sigma_prompt
    assert without.noise == scenario.noise
    assert noisy.noise.engine_sigma == noisy.noise.step_sigma == noisy.noise.portion_sigma == 0.1
    assert noisy.lengths == scenario.lengths
