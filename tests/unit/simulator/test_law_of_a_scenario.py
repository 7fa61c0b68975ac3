"""The law of lengths that policies see: its spreads are above 0, whatever the lengths are."""

from __future__ import annotations

import pytest

from services.scheduler.state.learned import MIN_SIGMA
from simulator.job_spec import population_law
from simulator.lengths import LengthLaw, Lengths, LengthSection

ALIKE = Lengths(turns=(((5,), (50,)), ((50,), (5,))), hints=(20.0, 20.0))
"""Two prompts that do not differ, with members that do."""


@pytest.mark.parametrize("law", [LengthLaw.LOGNORMAL, LengthLaw.TRACE])
def test_equal_prompts_have_the_smallest_legal_spread(law: LengthLaw) -> None:
    section = LengthSection(law=law, file="x" if law is LengthLaw.TRACE else "", sigma_prompt=0)
    assert population_law(section, ALIKE).sigma_prompt == MIN_SIGMA


def test_equal_members_have_the_smallest_legal_spread() -> None:
    assert population_law(LengthSection(sigma_group=0, hint_sigma=0), ALIKE).sigma_group == MIN_SIGMA
