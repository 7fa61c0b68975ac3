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
    rates = TrainingRates(assumed_s=2.0)
    rates.note(SMALL, num_tokens=1000, seconds=12.0)

    assert told(rates) == {SMALL: pytest.approx(100.0)}
    assert rates.expected_s(SMALL, num_tokens=500) == pytest.approx(5.0 + 2.0)


def test_an_update_that_is_shorter_than_assumed_of_its_fixed_part_has_a_rate_all_the_same() -> None:
    rates = TrainingRates(assumed_s=8.0)
    rates.note(SMALL, num_tokens=1000, seconds=0.5)

    assert told(rates) == {SMALL: pytest.approx(4000.0)}
    assert rates.expected_s(SMALL, num_tokens=1000) == pytest.approx(0.5)


def test_each_layout_has_its_own_rate_and_later_updates_count_more() -> None:
    rates = TrainingRates(assumed_s=0.0)
    for seconds in (50.0, 2.0, 2.0, 1.0, 1.0, 1.0):
        rates.note(SMALL, num_tokens=100, seconds=2.0)
        rates.note(LARGE, num_tokens=100, seconds=seconds)

    assert told(rates)[SMALL] == pytest.approx(50.0)
    assert 75.0 < told(rates)[LARGE] < 100.0


def test_the_layout_that_was_trained_in_last_is_told_last() -> None:
    rates = TrainingRates(assumed_s=0.0)
    for layout in (SMALL, LARGE, SMALL):
        rates.note(layout, num_tokens=100, seconds=2.0)

    assert [*told(rates)] == [LARGE, SMALL]


def test_the_first_update_in_a_layout_counts_only_until_there_is_another() -> None:
    rates = TrainingRates(assumed_s=0.0)
    rates.note(SMALL, num_tokens=100, seconds=50.0)
    assert told(rates) == {SMALL: pytest.approx(2.0)}
    rates.note(SMALL, num_tokens=100, seconds=1.0)
    assert told(rates) == {SMALL: pytest.approx(100.0)}


@pytest.mark.parametrize("assumed_s", [0.0, 2.0, 9.0])
def test_updates_of_other_sizes_tell_what_no_gpu_makes_shorter_whatever_was_assumed(assumed_s: float) -> None:
    rates = TrainingRates(assumed_s)
    for num_tokens in (900, 500, 1000, 1500, 800, 1200):
        rates.note(SMALL, num_tokens=num_tokens, seconds=3.0 + num_tokens / 100)
        rates.note(LARGE, num_tokens=num_tokens, seconds=3.0 + num_tokens / 200)

    assert rates.update_s() == pytest.approx(3.0, abs=0.15)
    assert told(rates) == {SMALL: pytest.approx(100.0, rel=0.02), LARGE: pytest.approx(200.0, rel=0.04)}
    assert rates.expected_s(LARGE, num_tokens=1000) == pytest.approx(8.0, rel=0.01)


def test_updates_that_are_nearly_alike_leave_it_as_assumed_however_they_scatter() -> None:
    rates = TrainingRates(assumed_s=3.0)
    for at, num_tokens in enumerate((1000, 1003, 998, 1001, 999, 1002)):
        rates.note(SMALL, num_tokens=num_tokens, seconds=13.0 + 0.3 * (-1) ** at)

    assert rates.update_s() is None, "the scheduler has the assumption"
    assert told(rates) == {SMALL: pytest.approx(100.0, rel=0.05)}


def test_what_no_gpu_makes_shorter_is_told_only_once_it_was_measured_and_from_then_on() -> None:
    rates = TrainingRates(assumed_s=8.0)
    for _ in range(3):
        rates.note(SMALL, num_tokens=1000, seconds=29.8)
        assert rates.update_s() is None, "of one size, they leave it as assumed"
        assert told(rates) == {SMALL: pytest.approx(1000 / 21.8)}
    for num_tokens in (500, 1500, 800):
        rates.note(SMALL, num_tokens=num_tokens, seconds=19.8 + num_tokens / 100)
    assert rates.update_s() == pytest.approx(19.8, abs=1.0)
    for _ in range(40):
        rates.note(SMALL, num_tokens=1000, seconds=29.8)
    assert rates.update_s() == pytest.approx(19.8, abs=1.0)
    assert told(rates) == {SMALL: pytest.approx(100.0, rel=0.1)}


def test_updates_of_one_size_that_are_shorter_than_assumed_of_the_fixed_part_say_so() -> None:
    rates = TrainingRates(assumed_s=8.0)
    for _ in range(3):
        rates.note(SMALL, num_tokens=1000, seconds=0.5)

    assert rates.update_s() == pytest.approx(0.25), "with 8 s and the rate an update would be foreseen to take 8.25 s"
    assert told(rates) == {SMALL: pytest.approx(4000.0)}


def test_seconds_that_fall_with_the_tokens_make_no_rate_without_bounds() -> None:
    for sign in (1, -1):
        rates = TrainingRates(assumed_s=1.0)
        for num_tokens in (1000, 500, 1500, 200, 3000):
            rates.note(SMALL, num_tokens=num_tokens, seconds=10.0 - sign * num_tokens / 400)
        update_s = rates.update_s()
        assert update_s is not None
        assert 0.0 <= update_s <= 10.0
        assert 0.0 < told(rates)[SMALL] < 1e4


def test_of_a_layout_without_an_update_nothing_is_expected_or_told() -> None:
    rates = TrainingRates(assumed_s=0.0)
    rates.note(SMALL, num_tokens=0, seconds=1.0)
    rates.note(SMALL, num_tokens=10, seconds=0.0)

    assert rates.told() == []
    assert rates.update_s() is None
    assert rates.expected_s(SMALL, num_tokens=10) is None
