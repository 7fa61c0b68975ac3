"""The actor's rates are bounded and per layout, and later updates count more than earlier ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.rates import MOST_SHARE, TrainingRates
from tidegate.codec import decode_layout
from tidegate.types import Layout

SMALL, LARGE = Layout(dp=2), Layout(tp=2, dp=2)


def by_layout(rates: TrainingRates) -> dict[Layout, float]:
    return {decode_layout(each.layout): each.rate_tokens_per_s for each in rates.by_layout()}


def test_a_rate_excludes_the_fixed_part_of_an_update() -> None:
    rates = TrainingRates(assumed_s=2.0)
    rates.note(SMALL, num_tokens=1000, seconds=12.0)

    assert by_layout(rates) == {SMALL: pytest.approx(100.0)}
    assert rates.expected_s(SMALL, num_tokens=500) == pytest.approx(5.0 + 2.0)


def test_an_update_shorter_than_the_assumed_fixed_part_still_gives_a_rate() -> None:
    rates = TrainingRates(assumed_s=8.0)
    rates.note(SMALL, num_tokens=1000, seconds=0.5)

    assert by_layout(rates) == {SMALL: pytest.approx(4000.0)}
    assert rates.expected_s(SMALL, num_tokens=1000) == pytest.approx(0.5)


def test_each_layout_has_its_own_rate_and_later_updates_count_more() -> None:
    rates = TrainingRates(assumed_s=0.0)
    for seconds in (50.0, 2.0, 2.0, 1.0, 1.0, 1.0):
        rates.note(SMALL, num_tokens=100, seconds=2.0)
        rates.note(LARGE, num_tokens=100, seconds=seconds)

    assert by_layout(rates)[SMALL] == pytest.approx(50.0)
    assert 75.0 < by_layout(rates)[LARGE] < 100.0


def test_the_layout_of_the_last_update_comes_last() -> None:
    rates = TrainingRates(assumed_s=0.0)
    for layout in (SMALL, LARGE, SMALL):
        rates.note(layout, num_tokens=100, seconds=2.0)

    assert [*by_layout(rates)] == [LARGE, SMALL]


def test_the_first_update_in_a_layout_counts_only_until_the_second() -> None:
    rates = TrainingRates(assumed_s=0.0)
    rates.note(SMALL, num_tokens=100, seconds=50.0)
    assert by_layout(rates) == {SMALL: pytest.approx(2.0)}
    rates.note(SMALL, num_tokens=100, seconds=1.0)
    assert by_layout(rates) == {SMALL: pytest.approx(100.0)}


@pytest.mark.parametrize("assumed_s", [0.0, 2.0, 9.0])
def test_updates_of_different_sizes_determine_the_fixed_part_whatever_was_assumed(assumed_s: float) -> None:
    rates = TrainingRates(assumed_s)
    for num_tokens in (900, 500, 1000, 1500, 800, 1200):
        rates.note(SMALL, num_tokens=num_tokens, seconds=3.0 + num_tokens / 100)
        rates.note(LARGE, num_tokens=num_tokens, seconds=3.0 + num_tokens / 200)

    assert rates.update_s() == pytest.approx(3.0, abs=0.15)
    assert by_layout(rates) == {SMALL: pytest.approx(100.0, rel=0.02), LARGE: pytest.approx(200.0, rel=0.04)}
    assert rates.expected_s(LARGE, num_tokens=1000) == pytest.approx(8.0, rel=0.01)


def test_updates_of_nearly_equal_sizes_leave_the_fixed_part_as_assumed_however_they_scatter() -> None:
    rates = TrainingRates(assumed_s=3.0)
    for at, num_tokens in enumerate((1000, 1003, 998, 1001, 999, 1002)):
        rates.note(SMALL, num_tokens=num_tokens, seconds=13.0 + 0.3 * (-1) ** at)

    assert rates.update_s() is None, "the scheduler has the assumption"
    assert by_layout(rates) == {SMALL: pytest.approx(100.0, rel=0.05)}


def test_the_fixed_part_is_reported_from_its_first_fit_on() -> None:
    rates = TrainingRates(assumed_s=8.0)
    for _ in range(3):
        rates.note(SMALL, num_tokens=1000, seconds=29.8)
        assert rates.update_s() is None, "updates of one size leave it as assumed"
        assert by_layout(rates) == {SMALL: pytest.approx(1000 / 21.8)}
    for num_tokens in (500, 1500, 800):
        rates.note(SMALL, num_tokens=num_tokens, seconds=19.8 + num_tokens / 100)
    assert rates.update_s() == pytest.approx(19.8, abs=1.0)
    for _ in range(40):
        rates.note(SMALL, num_tokens=1000, seconds=29.8)
    assert rates.update_s() == pytest.approx(19.8, abs=1.0)
    assert by_layout(rates) == {SMALL: pytest.approx(100.0, rel=0.1)}


def test_a_fixed_part_is_reported_where_updates_of_one_size_refute_the_assumption() -> None:
    rates = TrainingRates(assumed_s=8.0)
    for _ in range(3):
        rates.note(SMALL, num_tokens=1000, seconds=0.5)

    assert rates.update_s() == pytest.approx(0.25), "with 8 s and the rate, the forecast of an update would be 8.25 s"
    assert by_layout(rates) == {SMALL: pytest.approx(4000.0)}


def test_seconds_that_fall_with_the_tokens_make_no_rate_without_bounds() -> None:
    for sign in (1, -1):
        rates = TrainingRates(assumed_s=1.0)
        for num_tokens in (1000, 500, 1500, 200, 3000):
            rates.note(SMALL, num_tokens=num_tokens, seconds=10.0 - sign * num_tokens / 400)
        update_s = rates.update_s()
        assert update_s is not None
        assert 0.0 <= update_s <= 10.0
        assert 0.0 < by_layout(rates)[SMALL] < 1e4


def test_the_fixed_part_is_at_most_its_most_share_of_the_shortest_mean_update() -> None:
    rates = TrainingRates(assumed_s=1.0)
    for num_tokens in (500, 1500, 800, 1200):
        rates.note(SMALL, num_tokens=num_tokens, seconds=20.0 + num_tokens / 100)
    assert rates.update_s() == pytest.approx(20.0, abs=1.0)
    rates.note(LARGE, num_tokens=1000, seconds=2.0)
    assert rates.update_s() == pytest.approx(MOST_SHARE * 2.0)


UPDATES = st.tuples(st.sampled_from([SMALL, LARGE]), st.integers(1, 10**6), st.floats(1e-3, 1e4))


@given(assumed_s=st.floats(0, 100), updates=st.lists(UPDATES, min_size=1, max_size=8))
def test_all_rates_are_finite_and_above_0(assumed_s: float, updates: list[tuple[Layout, int, float]]) -> None:
    rates = TrainingRates(assumed_s)
    for layout, num_tokens, seconds in updates:
        rates.note(layout, num_tokens=num_tokens, seconds=seconds)
    assert all(rate > 0.0 and math.isfinite(rate) for rate in by_layout(rates).values())


def test_a_layout_without_an_update_has_no_rate_and_no_forecast() -> None:
    rates = TrainingRates(assumed_s=0.0)
    rates.note(SMALL, num_tokens=0, seconds=1.0)
    rates.note(SMALL, num_tokens=10, seconds=0.0)

    assert rates.by_layout() == []
    assert rates.update_s() is None
    assert rates.expected_s(SMALL, num_tokens=10) is None
