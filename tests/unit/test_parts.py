"""A long suite can run in parts: no test is in two of them, and none is in no part."""

from __future__ import annotations

import pytest

from tests.parts import dealt


@pytest.mark.parametrize("num_parts", [1, 2, 4, 7, 30])
def test_the_parts_hold_every_test_exactly_once(num_parts: int) -> None:
    tests = [f"test {number}" for number in range(23)]
    parts = [dealt(tests, f"{part}/{num_parts}") for part in range(1, num_parts + 1)]
    assert sorted(test for part in parts for test in part) == sorted(tests)


def test_parts_differ_by_at_most_one_test() -> None:
    sizes = {len(dealt(range(23), f"{part}/4")) for part in (1, 2, 3, 4)}
    assert sizes == {5, 6}


@pytest.mark.parametrize("part", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2"])
def test_a_text_that_names_no_part_is_refused_with_an_example(part: str) -> None:
    with pytest.raises(ValueError, match="such as 2/4"):
        dealt([1, 2, 3], part)
