"""The section of drawn response lengths, for benchmarks. `tidegate.length_law` draws them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.config.base import Count, PositiveFloat, Section

_Spread = Annotated[float, Field(ge=0, le=5)]


class LengthLawSection(Section):
    """The lognormal law of the responses' lengths."""

    median_tokens: PositiveFloat
    sigma_prompt: _Spread = 1.0
    """The spread of the logarithm between prompts."""
    sigma_group: _Spread = 0.6
    """The spread of the logarithm within a group."""
    seed: Count = 0
    """Its own, so that jobs with other seeds have the same lengths."""
