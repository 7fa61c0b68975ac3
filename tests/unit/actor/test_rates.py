"""What the actor tells of its speed: bounded, of each layout, the later updates before the earlier ones."""

from __future__ import annotations

import pytest

from services.actor.rates import TrainingRates
from tidegate.codec import decode_layout
from tidegate.types import Layout

SMALL, LARGE = Layout(dp=2), Layout(tp=2, dp=2)


def told(rates: TrainingRates) -> dict[Layout, float]:
    return {decode_layout(each.layout): each.rate_tokens_per_s for each in rates.told()}


def test_what_no_gpu_makes_shorter_is_left_out_of_an_updates_time() -> None:
    rates = TrainingRates(update_s=2.0)
    rates.note(SMALL, num_tokens=1000, seconds=12.0)

    assert told(rates) == {SMALL: pytest.approx(100.0)}
    assert rates.expected_s(SMALL, num_tokens=500) == pytest.approx(5.0 + 2.0)


def test_an_update_that_is_shorter_than_assumed_of_its_fixed_part_has_a_rate_all_the_same() -> None:
    rates = TrainingRates(update_s=8.0)
    rates.note(SMALL, num_tokens=1000, seconds=0.5)

    assert told(rates) == {SMALL: pytest.approx(4000.0)}
    assert rates.expected_s(SMALL, num_tokens=1000) == pytest.approx(0.5)


def test_each_layout_has_its_own_rate_and_later_updates_count_more() -> None:
    rates = TrainingRates(update_s=0.0)
    rates.note(LARGE, num_tokens=100, seconds=10.0)
    for _ in range(10):
        rates.note(SMALL, num_tokens=100, seconds=2.0)
        rates.note(LARGE, num_tokens=100, seconds=1.0)

    assert told(rates)[SMALL] == pytest.approx(50.0)
    assert 70.0 < told(rates)[LARGE] < 100.0


def test_of_a_layout_without_an_update_nothing_is_expected_or_told() -> None:
    rates = TrainingRates(update_s=0.0)
    rates.note(SMALL, num_tokens=0, seconds=1.0)
    rates.note(SMALL, num_tokens=10, seconds=0.0)

    assert rates.told() == []
    assert rates.expected_s(SMALL, num_tokens=10) is None
