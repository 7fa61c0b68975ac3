"""The actor's rates are bounded and per layout, and later updates count more than earlier ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.rates import MOST_SHARE, TrainingRates, load_of
from tidegate.codec import decode_layout
from tidegate.types import Layout

SMALL, LARGE = Layout(dp=2), Layout(tp=2, dp=2)


def by_layout(rates: TrainingRates) -> dict[Layout, float]:
    return {decode_layout(each.layout): each.rate_tokens_per_s for each in rates.by_layout()}


def note(rates: TrainingRates, layout: Layout, *, num_tokens: int, seconds: float) -> None:
    """An update whose tokens are shared evenly, without prompts."""
    rates.note(layout, num_tokens=num_tokens, load=num_tokens / layout.num_ranks, seconds=seconds, is_last=True)


def test_a_rate_excludes_the_fixed_part_of_an_update() -> None:
    rates = TrainingRates(assumed_s=2.0)
    note(rates, SMALL, num_tokens=1000, seconds=12.0)

    assert by_layout(rates) == {SMALL: pytest.approx(100.0)}


def test_an_update_shorter_than_the_assumed_fixed_part_still_gives_a_rate() -> None:
    rates = TrainingRates(assumed_s=8.0)
    note(rates, SMALL, num_tokens=1000, seconds=0.5)

    assert by_layout(rates) == {SMALL: pytest.approx(4000.0)}


def test_each_layout_has_its_own_rate_and_later_updates_count_more() -> None:
    rates = TrainingRates(assumed_s=0.0)
    for seconds in (50.0, 2.0, 2.0, 1.0, 1.0, 1.0):
        note(rates, SMALL, num_tokens=100, seconds=2.0)
        note(rates, LARGE, num_tokens=100, seconds=seconds)

    assert by_layout(rates)[SMALL] == pytest.approx(50.0)
    assert 70.0 < by_layout(rates)[LARGE] < 100.0


def test_the_layout_of_the_last_update_comes_last() -> None:
    rates = TrainingRates(assumed_s=0.0)
    for layout in (SMALL, LARGE, SMALL):
        note(rates, layout, num_tokens=100, seconds=2.0)

    assert [*by_layout(rates)] == [LARGE, SMALL]


def test_the_first_update_in_a_layout_counts_only_until_the_second() -> None:
    rates = TrainingRates(assumed_s=0.0)
    note(rates, SMALL, num_tokens=100, seconds=50.0)
    assert by_layout(rates) == {SMALL: pytest.approx(2.0)}
    note(rates, SMALL, num_tokens=100, seconds=1.0)
    assert by_layout(rates) == {SMALL: pytest.approx(100.0)}


@pytest.mark.parametrize("assumed_s", [0.0, 2.0, 9.0])
def test_updates_of_different_sizes_determine_the_fixed_part_whatever_was_assumed(assumed_s: float) -> None:
    rates = TrainingRates(assumed_s)
    for num_tokens in (900, 500, 1000, 1500, 800, 1200):
        note(rates, SMALL, num_tokens=num_tokens, seconds=3.0 + num_tokens / 100)
        note(rates, LARGE, num_tokens=num_tokens, seconds=3.0 + num_tokens / 200)

    assert rates.update_s() == pytest.approx(3.0, abs=0.15)
    assert by_layout(rates) == {SMALL: pytest.approx(100.0, rel=0.02), LARGE: pytest.approx(200.0, rel=0.04)}


def test_updates_of_nearly_equal_sizes_leave_the_fixed_part_as_assumed_however_they_scatter() -> None:
    rates = TrainingRates(assumed_s=3.0)
    for at, num_tokens in enumerate((1000, 1003, 998, 1001, 999, 1002)):
        note(rates, SMALL, num_tokens=num_tokens, seconds=13.0 + 0.3 * (-1) ** at)

    assert rates.update_s() is None, "the scheduler has the assumption"
    assert by_layout(rates) == {SMALL: pytest.approx(100.0, rel=0.05)}


def test_the_fixed_part_is_reported_from_its_first_fit_on() -> None:
    rates = TrainingRates(assumed_s=8.0)
    for _ in range(3):
        note(rates, SMALL, num_tokens=1000, seconds=29.8)
        assert rates.update_s() is None, "updates of one size leave it as assumed"
        assert by_layout(rates) == {SMALL: pytest.approx(1000 / 21.8)}
    for num_tokens in (500, 1500, 800):
        note(rates, SMALL, num_tokens=num_tokens, seconds=19.8 + num_tokens / 100)
    assert rates.update_s() == pytest.approx(19.8, abs=1.0)
    for _ in range(40):
        note(rates, SMALL, num_tokens=1000, seconds=29.8)
    assert rates.update_s() == pytest.approx(19.8, abs=1.0)
    assert by_layout(rates) == {SMALL: pytest.approx(100.0, rel=0.1)}


def test_a_fixed_part_is_reported_where_updates_of_one_size_refute_the_assumption() -> None:
    rates = TrainingRates(assumed_s=8.0)
    for _ in range(3):
        note(rates, SMALL, num_tokens=1000, seconds=0.5)

    assert rates.update_s() == pytest.approx(0.25), "with 8 s and the rate, the forecast of an update would be 8.25 s"
    assert by_layout(rates) == {SMALL: pytest.approx(4000.0)}


def test_seconds_that_fall_with_the_tokens_make_no_rate_without_bounds() -> None:
    for sign in (1, -1):
        rates = TrainingRates(assumed_s=1.0)
        for num_tokens in (1000, 500, 1500, 200, 3000):
            note(rates, SMALL, num_tokens=num_tokens, seconds=10.0 - sign * num_tokens / 400)
        update_s = rates.update_s()
        assert update_s is not None
        assert 0.0 <= update_s <= 10.0
        assert 0.0 < by_layout(rates)[SMALL] < 1e4


def test_the_fixed_part_is_at_most_its_most_share_of_the_shortest_mean_update() -> None:
    rates = TrainingRates(assumed_s=1.0)
    for num_tokens in (500, 1500, 800, 1200):
        note(rates, SMALL, num_tokens=num_tokens, seconds=20.0 + num_tokens / 100)
    assert rates.update_s() == pytest.approx(20.0, abs=1.0)
    note(rates, LARGE, num_tokens=1000, seconds=2.0)
    assert rates.update_s() == pytest.approx(MOST_SHARE * 2.0)


UPDATES = st.tuples(st.sampled_from([SMALL, LARGE]), st.integers(1, 10**6), st.floats(1e-3, 1e4))


@given(assumed_s=st.floats(0, 100), updates=st.lists(UPDATES, min_size=1, max_size=8))
def test_all_rates_are_finite_and_above_0(assumed_s: float, updates: list[tuple[Layout, int, float]]) -> None:
    rates = TrainingRates(assumed_s)
    for layout, num_tokens, seconds in updates:
        note(rates, layout, num_tokens=num_tokens, seconds=seconds)
    assert all(rate > 0.0 and math.isfinite(rate) for rate in by_layout(rates).values())


def test_a_layout_without_an_update_has_no_rate() -> None:
    rates = TrainingRates(assumed_s=0.0)
    note(rates, SMALL, num_tokens=0, seconds=1.0)
    note(rates, SMALL, num_tokens=10, seconds=0.0)

    assert rates.by_layout() == []
    assert rates.update_s() is None


def test_copies_of_one_kind_and_uneven_shares_determine_one_fixed_part() -> None:
    rates = TrainingRates(assumed_s=3.0)
    for dp, num_tokens, load in ((2, 60, 120.0), (2, 150, 130.0), (5, 300, 75.0), (8, 700, 250.0), (8, 200, 60.0)):
        for _ in range(2):
            rates.note(Layout(dp=dp), num_tokens=num_tokens, load=load, seconds=0.9 + load / 76, is_last=True)
    assert rates.update_s() == pytest.approx(0.9, abs=0.1)


def test_portions_before_the_last_tell_the_fixed_part_of_updates_of_one_size() -> None:
    rates = TrainingRates(assumed_s=3.0)
    for _ in range(4):
        rates.note(SMALL, num_tokens=90, load=50.0, seconds=0.5, is_last=False)
        rates.note(SMALL, num_tokens=90, load=50.0, seconds=0.5 + 0.9, is_last=True)
    assert rates.update_s() == pytest.approx(0.9, abs=0.05)
    assert by_layout(rates) == {SMALL: pytest.approx(180.0, rel=0.02)}


def test_a_first_portion_gives_a_rate_before_its_update() -> None:
    rates = TrainingRates(assumed_s=3.0)
    rates.note(SMALL, num_tokens=100, load=50.0, seconds=0.5, is_last=False)
    assert by_layout(rates) == {SMALL: pytest.approx(200.0)}
    assert rates.update_s() is None
    assert rates.expected_s(SMALL, [100, 100]) == pytest.approx(3.0 + 1.0)
    assert rates.tokens_in(SMALL, 1.0) == pytest.approx(200.0)


def test_nothing_is_expected_before_a_portion_of_the_kind_was_measured() -> None:
    rates = TrainingRates(assumed_s=0.0)
    rates.note(SMALL, num_tokens=100, load=50.0, seconds=0.5, is_last=False)
    assert rates.expected_s(LARGE, [100]) is None


def test_a_portion_of_the_same_load_takes_as_long_on_any_number_of_replicas() -> None:
    rates = TrainingRates(assumed_s=0.0)
    rates.note(LARGE, num_tokens=100, load=50.0, seconds=2.0, is_last=False)
    for dp in (1, 2, 5):
        assert rates.expected_s(Layout(tp=2, dp=dp), [100] * dp) == pytest.approx(2.0)


def test_the_load_is_that_of_the_busiest_rank() -> None:
    assert load_of([10, 10, 10, 10], Layout(dp=2)) == 20
    assert load_of([30, 5, 5], Layout(dp=2)) == 30, "a sequence is in one replica"
    assert load_of([10, 10, 10, 10], Layout(dp=2, tp=2, pp=2)) == 5
    assert load_of([], Layout(dp=2)) == 0
