"""The order of groups: what it may name, and for which iteration it holds."""

from __future__ import annotations

import pytest

from services.rollout.group_order import GroupOrder, order_fault


@pytest.mark.parametrize(
    ("groups", "want"),
    [
        pytest.param((0, 4), "names group 4; the iteration has at most 4 groups: name 0 to 3", id="one beyond"),
        pytest.param(
            (2, 0, 2, 2),
            "names group 2 more than twice: once for its first response, and once for its others",
            id="one three times",
        ),
        pytest.param(
            tuple(range(14)),
            "names groups 4, 5, 6, 7, 8, 9, 10, 11 and 2 more; the iteration has at most 4 groups: name 0 to 3",
            id="many beyond",
        ),
    ],
)
def test_an_order_that_the_iteration_cannot_have_is_refused_with_its_numbers(
    groups: tuple[int, ...], want: str
) -> None:
    assert order_fault(groups, num_groups=4) == want


@pytest.mark.parametrize("groups", [(), (3,), (3, 0, 2, 1), (3, 0, 3)])
def test_an_order_may_name_some_groups_or_all(groups: tuple[int, ...]) -> None:
    assert order_fault(groups, num_groups=4) is None


def test_another_iteration_begins_without_the_order() -> None:
    order = GroupOrder(incarnation=2, iteration=5, groups=(1, 0))
    assert order.prompts(incarnation=2, iteration=5, first_prompt=20) == (21, 20)
    assert order.prompts(incarnation=2, iteration=6, first_prompt=20) == ()
    assert order.prompts(incarnation=3, iteration=5, first_prompt=20) == ()
