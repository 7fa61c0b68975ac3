"""Curves over iterations: their points, the lines between them, and the message for each wrong point."""

from __future__ import annotations

import pytest

from simulator.curves import BadCurve, Curve, curve_text, parse_curve
from simulator.drift import NAMED


def parsed(text: str, *, has_lines: bool = False) -> Curve:
    return parse_curve(text, name="curve.txt", low=1, high=1e7, has_lines=has_lines)


def test_a_curve_goes_through_its_points_in_straight_lines_and_is_level_outside_them() -> None:
    curve = parsed("10: 100, 20: 300\n30: 200  # back")
    assert [curve.at(each) for each in (0, 10, 15, 20, 25, 30, 99)] == [100, 100, 200, 300, 250, 200, 200]
    assert [curve.step(each) for each in (0, 10, 19, 20, 99)] == [100, 100, 100, 300, 200]


def test_a_mapping_and_a_text_give_the_same_curve() -> None:
    assert parsed(curve_text({0: 1500, 200: 10_000})) == parsed("0: 1500\n200: 10000") == parsed("0 1500, 200 1e4")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0: 5\n\n7", "curve.txt:3: '7' is no point: write an iteration, a colon and a number, such as 200: 10000"),
        ("0: 5\n9: x", "curve.txt:2: '9: x' has no number after its iteration"),
        ("0: nan", "curve.txt:1: '0: nan' has no number after its iteration"),
        ("-1: 5", "curve.txt:1: '-1: 5' names no iteration from 0 to 1,000,000: write a whole number"),
        ("1" * 5000 + ": 5", "names no iteration from 0 to 1,000,000: write a whole number"),
        ("5: 10\n4: 20", "curve.txt:2: iteration 4 comes after iteration 5: write the points in the order of their"),
        ("5: 10\n5: 20", "curve.txt:2: iteration 5 comes after iteration 5: write the points in the order of their"),
        ("0: 5\n1: -4", "curve.txt:2: -4 at iteration 1 is not from 1 to 10,000,000: correct it"),
        ("# nothing", "curve.txt has no point: write at least one, such as 0: 1500"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(text: str, want: str) -> None:
    with pytest.raises(BadCurve) as caught:
        parsed(text, has_lines=True)
    assert want in str(caught.value)


def test_the_named_curves_rise_in_their_iterations() -> None:
    for named in NAMED.values():
        for curve in (named.mean, named.limits):
            iterations = [iteration for iteration, _ in curve.points] if curve else [0]
            assert iterations == sorted(set(iterations))
            assert iterations[0] == 0
