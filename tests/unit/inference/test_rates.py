"""What inference tells of its speed: of a GPU, later calls before earlier ones."""

from __future__ import annotations

import pytest

from services.inference.rates import ScoringRate


def test_before_a_call_there_is_no_rate() -> None:
    rate = ScoringRate()
    rate.note(num_tokens=0, num_gpus=2, seconds=1.0)
    rate.note(num_tokens=10, num_gpus=2, seconds=0.0)
    assert rate.tokens_per_s_per_gpu() is None


def test_a_rate_is_of_a_gpu_whatever_their_number() -> None:
    rate = ScoringRate()
    rate.note(num_tokens=1000, num_gpus=2, seconds=9.0)
    rate.note(num_tokens=1000, num_gpus=2, seconds=5.0)
    assert rate.tokens_per_s_per_gpu() == pytest.approx(100.0)
    rate.note(num_tokens=1000, num_gpus=4, seconds=2.5)
    assert rate.tokens_per_s_per_gpu() == pytest.approx(100.0)


def test_the_first_call_which_builds_kernels_is_not_told() -> None:
    rate = ScoringRate()
    rate.note(num_tokens=1000, num_gpus=1, seconds=100.0)
    assert rate.tokens_per_s_per_gpu() is None
    rate.note(num_tokens=1000, num_gpus=1, seconds=10.0)
    assert rate.tokens_per_s_per_gpu() == pytest.approx(100.0)


def test_later_calls_count_more() -> None:
    rate = ScoringRate()
    for _ in range(40):
        rate.note(num_tokens=100, num_gpus=1, seconds=1.0)
    for _ in range(10):
        rate.note(num_tokens=100, num_gpus=1, seconds=0.5)
    assert 130.0 < (rate.tokens_per_s_per_gpu() or 0.0) < 200.0
