"""What policies are told of lengths: spreads above 0, whatever the lengths are."""

from __future__ import annotations

import pytest

from services.scheduler.state.learned import MIN_SIGMA
from simulator.job import population_law
from simulator.lengths import LengthLaw, Lengths, LengthSection

ALIKE = Lengths(turns=(((5,), (50,)), ((50,), (5,))), hints=(20.0, 20.0))
"""Prompts that differ no more than their members."""


@pytest.mark.parametrize("law", [LengthLaw.LOGNORMAL, LengthLaw.TRACE])
def test_prompts_that_are_alike_have_a_spread_that_may_be_divided_by(law: LengthLaw) -> None:
    section = LengthSection(law=law, file="x" if law is LengthLaw.TRACE else "", sigma_prompt=0)
    assert population_law(section, ALIKE).sigma_prompt == MIN_SIGMA


def test_members_that_are_alike_have_a_spread_that_may_be_divided_by() -> None:
    assert population_law(LengthSection(sigma_group=0, hint_sigma=0), ALIKE).sigma_group == MIN_SIGMA
