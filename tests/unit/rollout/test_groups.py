"""Groups in progress: each sample arrives once, whichever engines die."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.groups import GroupsInProgress
from tidegate.types import SampleId


def _groups() -> GroupsInProgress[str]:
    return GroupsInProgress(incarnation=1, iteration=2, prompts=(7, 8), group_size=2)


def test_samples_are_assigned_in_order_and_a_group_comes_out_when_it_is_complete() -> None:
    groups = _groups()
    first, second, third = groups.take(3)
    assert [str(first), str(second), str(third)] == ["1.2.7.0", "1.2.7.1", "1.2.8.0"]
    assert groups.add(second, "b") is None
    assert groups.add(third, "c") is None
    assert groups.add(first, "a") == ["a", "b"]
    assert not groups.is_done


def test_added_groups_are_assigned_after_waiting_ones() -> None:
    groups = _groups()
    for sample in groups.take(4):
        groups.add(sample, "x")
    assert groups.is_done
    groups.extend([9])
    assert not groups.is_done
    assert groups.take(9) == (SampleId(1, 2, 9, 0), SampleId(1, 2, 9, 1))
    with pytest.raises(ValueError, match="prompt 9 is in progress already"):
        groups.extend([9])


def test_the_samples_that_a_lost_engine_held_are_assigned_again_before_later_ones() -> None:
    groups = _groups()
    held = groups.take(2)
    groups.give_back(held)
    assert groups.take(3) == (*held, SampleId(1, 2, 8, 0))


def test_a_late_answer_of_a_lost_engine_is_not_accepted() -> None:
    groups = _groups()
    (sample,) = groups.take(1)
    groups.give_back([sample])
    assert groups.add(sample, "late") is None
    assert groups.take(1) == (sample,)
    groups.add(sample, "again")
    groups.give_back([sample])
    assert groups.num_waiting == 3


def test_an_order_holds_for_waiting_and_given_back_samples_and_the_rest_comes_last() -> None:
    groups: GroupsInProgress[str] = GroupsInProgress(incarnation=1, iteration=2, prompts=(7, 8, 9), group_size=1)
    (held,) = groups.take(1)
    groups.order([8, 7])
    groups.extend([10])
    groups.give_back([held])
    assert [sample.prompt for sample in groups.waiting] == [8, 7, 9, 10]
    groups.order(())
    assert [sample.prompt for sample in groups.take(9)] == [7, 8, 9, 10]


def test_a_prompt_that_is_named_twice_has_its_first_draw_before_its_others() -> None:
    groups: GroupsInProgress[str] = GroupsInProgress(incarnation=1, iteration=2, prompts=(7, 8, 9), group_size=3)
    held = groups.take(1)
    groups.order([8, 7, 9, 7, 8])
    groups.give_back(held)
    places = [(sample.prompt, sample.draw) for sample in groups.waiting]
    assert places == [(8, 0), (7, 0), (9, 0), (9, 1), (9, 2), (7, 1), (7, 2), (8, 1), (8, 2)]


@given(st.lists(st.tuples(st.sampled_from(["take", "add", "lose", "order"]), st.integers(0, 3)), max_size=40))
def test_every_history_ends_with_each_sample_once(steps: list[tuple[str, int]]) -> None:
    groups = _groups()
    running: list[SampleId] = []
    complete: list[list[str]] = []

    def add(sample: SampleId) -> None:
        group = groups.add(sample, str(sample))
        if group is not None:
            complete.append(group)

    for step, number in steps:
        if step == "take":
            running.extend(groups.take(number))
        elif step == "order":
            groups.order([8, 7, 8][:number])
        elif running and step == "add":
            add(running.pop(number % len(running)))
        elif running:
            groups.give_back([running.pop(number % len(running))])
    for sample in (*running, *groups.take(4)):
        add(sample)
    assert sorted(complete) == [["1.2.7.0", "1.2.7.1"], ["1.2.8.0", "1.2.8.1"]]
    assert groups.is_done
