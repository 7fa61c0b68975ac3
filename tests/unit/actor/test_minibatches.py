"""Minibatches take every group once, in the config's order. Replaced groups without spread do not count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.minibatches import MinibatchAssembly
from tidegate.candidates import Candidates
from tidegate.types import MinibatchOrder


def _assembly(order: MinibatchOrder, *, max_extra_prompts: int = 0) -> MinibatchAssembly:
    return MinibatchAssembly(Candidates(10, 4, max_extra_prompts), num_minibatches=2, order=order)


def _take(assembly: MinibatchAssembly) -> tuple[int, ...] | None:
    """The next minibatch, all at once. None while one of its groups is missing."""
    if not assembly.is_filled_by_joining:
        return None
    assembly.join(assembly.joining)
    return assembly.close()


def test_fixed_order_waits_for_each_prompt_in_turn() -> None:
    assembly = _assembly(MinibatchOrder.FIXED)
    for prompt in (13, 12, 11):
        assembly.add(prompt, has_spread=True)
        assert _take(assembly) is None
    assembly.add(10, has_spread=True)
    assert _take(assembly) == (10, 11)
    assert _take(assembly) == (12, 13)
    assert _take(assembly) is None
    assert assembly.is_done


def test_arrival_order_takes_the_first_complete_groups() -> None:
    assembly = _assembly(MinibatchOrder.ARRIVAL)
    assembly.add(13, has_spread=True)
    assert _take(assembly) is None
    assembly.add(11, has_spread=True)
    assert _take(assembly) == (13, 11)


@pytest.mark.parametrize("order", MinibatchOrder)
@given(arrivals=st.permutations(range(10, 14)), spread=st.lists(st.booleans(), min_size=4, max_size=4))
def test_every_prompt_is_taken_once(order: MinibatchOrder, arrivals: list[int], spread: list[bool]) -> None:
    assembly = _assembly(order)
    taken: list[int] = []
    for prompt in arrivals:
        assembly.add(prompt, has_spread=spread[prompt - 10])
        while (minibatch := _take(assembly)) is not None:
            assert len(minibatch) == 2
            taken.extend(minibatch)
    assert sorted(taken) == [10, 11, 12, 13]
    assert assembly.is_done


def test_with_replacement_a_minibatch_holds_as_many_groups_with_spread_as_it_would_hold_groups_without_it() -> None:
    assembly = _assembly(MinibatchOrder.FIXED, max_extra_prompts=4)
    for prompt in (10, 11, 12):
        assembly.add(prompt, has_spread=prompt != 11)
    assert _take(assembly) == (10, 11, 12)
    for prompt in (13, 14):
        assembly.add(prompt, has_spread=True)
    assert _take(assembly) == (13, 14)
    assert assembly.is_done


def test_when_the_extra_prompts_are_used_up_the_remaining_groups_are_the_last_minibatch() -> None:
    assembly = _assembly(MinibatchOrder.FIXED, max_extra_prompts=2)
    for prompt in range(10, 16):
        assembly.add(prompt, has_spread=prompt in (10, 11, 13))
    assert [_take(assembly) for _ in range(3)] == [(10, 11), (12, 13, 14, 15), None]
    assert assembly.is_done


SPREAD = st.lists(st.booleans(), min_size=10, max_size=10)


@pytest.mark.parametrize("order", MinibatchOrder)
@given(spread=SPREAD, ranking=st.permutations(range(10)))
def test_with_replacement_every_candidate_is_in_one_minibatch(
    order: MinibatchOrder, spread: list[bool], ranking: list[int]
) -> None:
    minibatches, candidates = _run(order, spread, ranking)
    assert sorted(prompt for minibatch in minibatches for prompt in minibatch) == list(candidates.prompts)
    counted = [sum(map(candidates.counts, minibatch)) for minibatch in minibatches]
    assert all(count == 2 for count in counted[:-1])
    assert sum(counted) == sum(spread[: len(candidates.prompts)])


@given(spread=SPREAD, ranking=st.permutations(range(10)))
def test_in_fixed_order_minibatches_do_not_depend_on_when_groups_come(spread: list[bool], ranking: list[int]) -> None:
    minibatches, _ = _run(MinibatchOrder.FIXED, spread, ranking)
    assert minibatches == _run(MinibatchOrder.FIXED, spread, list(range(10)))[0]


def _run(order: MinibatchOrder, spread: list[bool], ranking: list[int]) -> tuple[list[tuple[int, ...]], Candidates]:
    """The minibatches and the candidates where, of the known candidates, the first in `ranking` always arrives next."""
    assembly = _assembly(order, max_extra_prompts=6)
    candidates = assembly.candidates
    minibatches: list[tuple[int, ...]] = []
    while not assembly.is_done:
        prompt = min(set(candidates.prompts) - set(candidates.seen), key=lambda each: ranking[each - 10])
        assembly.add(prompt, has_spread=spread[prompt - 10])
        while (minibatch := _take(assembly)) is not None:
            minibatches.append(minibatch)
    return minibatches, candidates


def test_in_fixed_order_the_longest_complete_prefix_may_join() -> None:
    assembly = _assembly(MinibatchOrder.FIXED)
    assembly.add(11, has_spread=True)
    assert not assembly.joining
    assembly.add(10, has_spread=True)
    assembly.add(12, has_spread=True)
    assert (assembly.joining, assembly.is_filled_by_joining) == ((10, 11), True)
    assembly.join((10,))
    assert (assembly.open, assembly.joining, assembly.num_taken) == ((10,), (11,), 1)


def test_in_arrival_order_all_that_came_may_join() -> None:
    assembly = _assembly(MinibatchOrder.ARRIVAL)
    assembly.add(13, has_spread=True)
    assert (assembly.joining, assembly.is_filled_by_joining) == ((13,), False)
    assembly.join((13,))
    assembly.add(12, has_spread=True)
    assembly.add(10, has_spread=True)
    assert (assembly.joining, assembly.is_filled_by_joining) == ((12,), True)


@pytest.mark.parametrize("order", MinibatchOrder)
def test_groups_that_are_given_back_join_first_again(order: MinibatchOrder) -> None:
    assembly = _assembly(order)
    for prompt in (10, 11, 12):
        assembly.add(prompt, has_spread=True)
    assembly.join((10,))
    assembly.give_back()
    assert (assembly.open, assembly.joining, assembly.num_taken) == ((), (10, 11), 0)


def test_an_open_minibatch_is_not_done_although_all_groups_joined() -> None:
    assembly = _assembly(MinibatchOrder.FIXED)
    for prompt in range(10, 14):
        assembly.add(prompt, has_spread=True)
    assert _take(assembly) == (10, 11)
    assembly.join((12, 13))
    assert not assembly.is_done
    assert assembly.close() == (12, 13)
    assert assembly.is_done


def test_a_prompt_of_another_iteration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt 14 is not of this iteration \(10-13\)"):
        _assembly(MinibatchOrder.FIXED).add(14, has_spread=True)


@pytest.mark.parametrize("order", MinibatchOrder)
def test_a_prompt_added_twice_is_refused_even_after_a_minibatch_took_it(order: MinibatchOrder) -> None:
    assembly = _assembly(order)
    assembly.add(10, has_spread=True)
    assembly.add(11, has_spread=True)
    assert _take(assembly) == (10, 11)
    with pytest.raises(ValueError, match="prompt 11 was added before"):
        assembly.add(11, has_spread=True)
