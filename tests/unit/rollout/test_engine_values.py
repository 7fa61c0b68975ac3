"""The values of requests and responses are checked when they are created."""

from __future__ import annotations

from typing import Any

import pytest

from services.rollout.engine import Response, SamplingParams, VersionSpan


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "max_new_tokens=0 must be at least 1"),
        ("temperature", -0.1, "temperature=-0.1 must be finite"),
        ("temperature", float("nan"), "temperature=nan must be finite"),
        ("temperature", float("inf"), "temperature=inf must be finite"),
        ("top_p", 0.0, "top_p=0.0 must be in"),
        ("top_p", 1.5, "top_p=1.5 must be in"),
        ("seed", -1, "seed=-1 must be in"),
        ("seed", 2**64, "must be in"),
    ],
)
def test_sampling_out_of_range_is_refused_with_the_range(field: str, value: float, message: str) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 4, field: value}
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("num_log_probs", "spans", "message"),
    [
        pytest.param(2, [(0, 3)], "3 tokens has 2 log-probabilities", id="a log-probability is missing"),
        pytest.param(3, [(0, 2)], "cover 2 of 3 tokens", id="the last token has no version"),
        pytest.param(3, [(0, 1), (2, 3)], "must start at 1", id="a gap"),
        pytest.param(3, [(0, 2), (1, 3)], "must start at 2", id="an overlap"),
        pytest.param(3, [(0, 0), (0, 3)], "hold a token", id="an empty span"),
        pytest.param(3, [(0, 4)], "cover 4 of 3 tokens", id="a span past the end"),
    ],
)
def test_a_response_whose_parts_do_not_match_is_refused(
    num_log_probs: int, spans: list[tuple[int, int]], message: str
) -> None:
    versions = tuple(VersionSpan(version=1, start=start, end=end) for start, end in spans)
    with pytest.raises(ValueError, match=message):
        Response(tokens=(1, 2, 3), log_probs=(-0.5,) * num_log_probs, versions=versions)
