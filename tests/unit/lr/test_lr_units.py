"""Sets of units, compared with Python's own sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.lr.errors import DuplicateUnit, OverConsumption, UnknownUnit
from tidegate.lr.units import Units

SETS = st.frozensets(st.integers(0, 40))


@given(mine=SETS, others=SETS)
def test_units_behave_as_pythons_sets(mine: frozenset[int], others: frozenset[int]) -> None:
    left, right = Units.of(mine), Units.of(others)
    assert list(left) == sorted(mine)
    assert (left.count, bool(left)) == (len(mine), bool(mine))
    assert list(left & right) == sorted(mine & others)
    assert list(left - right) == sorted(mine - others)
    assert (left - right) | right == Units.of(mine | others)


@given(mine=SETS, count=st.integers(0, 41))
def test_the_first_units_of_a_set_are_its_lowest(mine: frozenset[int], count: int) -> None:
    if count > len(mine):
        with pytest.raises(OverConsumption, match=f"{count} units are requested and only {len(mine)} are pending"):
            Units.of(mine).first(count)
    else:
        assert list(Units.of(mine).first(count)) == sorted(mine)[:count]


@given(mine=SETS)
def test_runs_are_sorted_disjoint_and_merged(mine: frozenset[int]) -> None:
    runs = Units.of(mine).runs
    assert all(first < stop for first, stop in runs)
    assert all(stop < first for (_, stop), (first, _) in pairwise(runs))


def test_a_unit_that_two_ranks_consume_is_refused() -> None:
    with pytest.raises(DuplicateUnit, match="unit 3 occurs twice"):
        Units.of(range(4), [7, 3])


@pytest.mark.parametrize("unit", [True, 1.0, "1", None])
def test_a_value_that_is_no_int_is_refused_as_a_unit(unit: int) -> None:
    with pytest.raises(UnknownUnit, match="is no unit"):
        Units.of([unit])


def test_a_large_set_of_units_is_stored_as_few_numbers() -> None:
    many = Units.of(range(10**12)) - Units.of([5])
    assert many.runs == ((0, 5), (6, 10**12))
    assert (many.count, many.first(10**11).count) == (10**12 - 1, 10**11)
