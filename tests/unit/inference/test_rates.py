"""The inference's rate is that of one GPU, and later calls count more."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference.rates import ScoringRate


def test_without_a_call_there_is_no_rate() -> None:
    rate = ScoringRate()
    rate.note(num_tokens=0, num_gpus=2, seconds=1.0)
    rate.note(num_tokens=10, num_gpus=2, seconds=0.0)
    assert rate.tokens_per_s_per_gpu() is None


def test_the_rate_of_one_gpu_is_the_same_for_any_number_of_gpus() -> None:
    rate = ScoringRate()
    rate.note(num_tokens=1000, num_gpus=2, seconds=9.0)
    rate.note(num_tokens=1000, num_gpus=2, seconds=5.0)
    assert rate.tokens_per_s_per_gpu() == pytest.approx(100.0)
    rate.note(num_tokens=1000, num_gpus=4, seconds=2.5)
    assert rate.tokens_per_s_per_gpu() == pytest.approx(100.0)


def test_the_first_call_which_builds_kernels_does_not_count() -> None:
    rate = ScoringRate()
    rate.note(num_tokens=1000, num_gpus=1, seconds=100.0)
    assert rate.tokens_per_s_per_gpu() is None
    rate.note(num_tokens=1000, num_gpus=1, seconds=10.0)
    assert rate.tokens_per_s_per_gpu() == pytest.approx(100.0)


def test_later_calls_count_more_for_the_scoring_rate() -> None:
    rate = ScoringRate()
    for _ in range(40):
        rate.note(num_tokens=100, num_gpus=1, seconds=1.0)
    for _ in range(10):
        rate.note(num_tokens=100, num_gpus=1, seconds=0.5)
    assert 130.0 < (rate.tokens_per_s_per_gpu() or 0.0) < 200.0


CALLS = st.tuples(st.integers(0, 10**6), st.integers(1, 64), st.floats(0.0, 1e4).filter(lambda s: s == 0.0 or s > 1e-6))


@given(st.lists(CALLS, max_size=8))
def test_a_scoring_rate_is_finite_and_above_0(calls: list[tuple[int, int, float]]) -> None:
    rate = ScoringRate()
    for num_tokens, num_gpus, seconds in calls:
        rate.note(num_tokens=num_tokens, num_gpus=num_gpus, seconds=seconds)
    value = rate.tokens_per_s_per_gpu()
    assert value is None or (value > 0.0 and math.isfinite(value))
