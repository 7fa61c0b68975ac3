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
