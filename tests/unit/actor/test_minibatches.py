"""Minibatches: every group once, in the order that the config names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.minibatches import MinibatchAssembly
from tidegate.types import MinibatchOrder


def _assembly(order: MinibatchOrder) -> MinibatchAssembly:
    return MinibatchAssembly(first_prompt=10, num_prompts=4, num_minibatches=2, order=order)


def test_fixed_order_waits_for_its_prompts() -> None:
    assembly = _assembly(MinibatchOrder.FIXED)
    for prompt in (13, 12, 11):
        assembly.add(prompt)
        assert assembly.take() is None
    assembly.add(10)
    assert assembly.take() == (10, 11)
    assert assembly.take() == (12, 13)
    assert assembly.take() is None
    assert assembly.is_done


def test_arrival_order_takes_the_first_complete_groups() -> None:
    assembly = _assembly(MinibatchOrder.ARRIVAL)
    assembly.add(13)
    assert assembly.take() is None
    assembly.add(11)
    assert assembly.take() == (13, 11)


@pytest.mark.parametrize("order", MinibatchOrder)
@given(arrivals=st.permutations(range(10, 14)))
def test_every_prompt_is_given_out_once(order: MinibatchOrder, arrivals: list[int]) -> None:
    assembly = _assembly(order)
    given_out: list[int] = []
    for prompt in arrivals:
        assembly.add(prompt)
        while (minibatch := assembly.take()) is not None:
            given_out.extend(minibatch)
    assert sorted(given_out) == [10, 11, 12, 13]
    assert assembly.is_done


def test_a_prompt_of_another_iteration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt 14 is not of this iteration \(10-13\)"):
        _assembly(MinibatchOrder.FIXED).add(14)


@pytest.mark.parametrize("order", MinibatchOrder)
def test_a_prompt_added_twice_is_refused_even_after_it_was_given_out(order: MinibatchOrder) -> None:
    assembly = _assembly(order)
    assembly.add(10)
    assembly.add(11)
    assert assembly.take() == (10, 11)
    with pytest.raises(ValueError, match="prompt 11 was added before"):
        assembly.add(11)
