"""An order of groups puts each response of theirs at one place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.order_of_responses import responses_in


@given(st.permutations([0, 1, 2, 3]), st.permutations([0, 1, 2, 3]), st.integers(0, 4), st.integers(1, 4))
def test_a_group_that_is_named_twice_has_its_first_response_first(
    once: list[int], again: list[int], num_again: int, size: int
) -> None:
    order = [*once, *again[:num_again]]
    found = list(responses_in(order, size))
    assert sorted(found) == [(group, draw) for group in range(4) for draw in range(size)]
    first, other = ([group for group, draw in found if draw == wanted] for wanted in (0, 1))
    assert first == once
    assert other == ([each for each in order if each not in again[:num_again]] + again[:num_again] if size > 1 else [])


def test_probes_come_before_the_others_and_groups_that_are_not_named_have_no_place() -> None:
    assert list(responses_in([2, 0, 2], 3)) == [(2, 0), (0, 0), (0, 1), (0, 2), (2, 1), (2, 2)]
    assert list(responses_in([], 3)) == []
