"""Rows of times over a grid, read at places between its points."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.policy.tide.rows import alike, in_order, places_of, values_at

TIMES = np.array([[0.0, 1.0, 3.0, 7.0], [0.0, 10.0, 20.0, 21.0]])


def test_between_two_points_a_value_lies_on_the_line_and_beyond_the_end_it_is_the_last() -> None:
    got = values_at(TIMES, np.array([[0.0, 1.5, 9.0], [0.5, 2.0, 3.5]]))
    assert got.tolist() == [[0.0, 2.0, 7.0], [5.0, 20.0, 21.0]]


def test_before_the_beginning_the_first_line_goes_on() -> None:
    assert values_at(TIMES, np.array([[-1.0, -2.5], [-0.5, -3.0]])).tolist() == [[-1.0, -2.5], [-5.0, -30.0]]


@pytest.mark.parametrize("values", [(-2.5, -30.0), (0.0, 0.0), (2.0, 15.0), (6.9, 20.5), (7.0, 21.0)])
def test_a_rows_places_are_where_its_values_are(values: tuple[float, float]) -> None:
    places = places_of(TIMES, np.array(values))
    assert values_at(TIMES, places[:, None])[:, 0] == pytest.approx(values)


def test_each_row_is_put_in_its_own_order() -> None:
    assert in_order(TIMES, np.array([[3, 0, 1, 2], [0, 1, 3, 2]])).tolist() == [[7, 0, 1, 3], [0, 10, 21, 20]]


def test_rows_of_a_kind_have_all_keys_in_common() -> None:
    first, place = alike([3, 1, 3, 3, 1], [0.5, 0.5, 0.5, 0.0, 0.5])
    assert (first.tolist(), place.tolist()) == ([0, 1, 3], [0, 1, 0, 2, 1])
