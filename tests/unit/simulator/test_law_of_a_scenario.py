"""The law of lengths that policies see: its spreads are above 0, whatever the lengths are."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.state.learned import MIN_SIGMA
from simulator.job_spec import mean_tokens, population_law, response_share
from simulator.lengths import LengthLaw, Lengths, LengthSection, draw_lengths
from simulator.scenario import parse_scenario

ALIKE = Lengths(turns=(((5,), (50,)), ((50,), (5,))), hints=(20.0, 20.0))
"""Two prompts that do not differ, with members that do."""


@pytest.mark.parametrize("law", [LengthLaw.LOGNORMAL, LengthLaw.TRACE])
def test_equal_prompts_have_the_smallest_legal_spread(law: LengthLaw) -> None:
    section = LengthSection(law=law, file="x" if law is LengthLaw.TRACE else "", sigma_prompt=0)
    assert population_law(section, ALIKE).sigma_prompt == MIN_SIGMA


def test_equal_members_have_the_smallest_legal_spread() -> None:
    assert population_law(LengthSection(sigma_group=0, hint_sigma=0), ALIKE).sigma_group == MIN_SIGMA


@pytest.mark.parametrize("max_tokens", [200, 20_000])
def test_the_mean_of_the_law_is_that_of_drawn_lengths_which_are_cut(max_tokens: int) -> None:
    section = LengthSection(median_tokens=100, sigma_prompt=0.7, sigma_group=0.5, min_tokens=1, max_tokens=max_tokens)
    drawn = draw_lengths(section, num_prompts=20_000, group_size=4, rng=np.random.default_rng(0))
    want = np.mean([sum(turns) for row in drawn.turns for turns in row])
    assert mean_tokens(population_law(section, ALIKE)) == pytest.approx(want, rel=0.02)


def test_the_mean_of_a_law_with_the_widest_spread_is_finite() -> None:
    section = LengthSection(median_tokens=100, sigma_prompt=10, sigma_group=10, min_tokens=1, max_tokens=1000)
    assert 100 < mean_tokens(population_law(section, ALIKE)) <= 1000


def test_prompts_and_observations_are_no_part_of_the_responses_share() -> None:
    """Lengths of 100 tokens in 3 turns, a prompt of 60 and two observations of 20."""
    lengths = {"median_tokens": 100, "sigma_prompt": 0, "sigma_group": 0, "mean_turns": 3, "observation_tokens": 20}
    raw = {"cluster": {"nodes": {"n0": 1}, "placement": {"rollout": "0"}}, "lengths": lengths}
    raw |= {"algorithm": {"prompt_tokens": 60}, "costs": {"engine": {"gpus_per_engine": 1}}}
    scenario = parse_scenario(raw)
    assert response_share(scenario, population_law(scenario.lengths, ALIKE)) == pytest.approx(0.5, rel=1e-3)
