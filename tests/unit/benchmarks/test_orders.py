"""Orders of sequences whose lengths are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.clairvoyant.orders import Keys, Order, changed_order, random_order, sequences_in

LENGTHS = np.array([[30.0, 10.0], [200.0, 150.0], [60.0, 90.0], [400.0, 5.0]])
KEYS = Keys((np.array([20.0, 180.0, 80.0, 300.0]), LENGTHS.max(axis=1), LENGTHS.mean(axis=1)), LENGTHS)


ORDERS = {
    "by hints the longest prompt first, its longest member first": (Order(key=0, share=0.0), (6, 7, 2, 3, 5, 4, 0, 1)),
    "the shortest one before the longest": (Order(key=0, share=0.25), (0, 1, 6, 7, 2, 3, 5, 4)),
    "two short ones a long one": (Order(key=0, share=0.5, shorts_a_long=2.0), (0, 1, 5, 4, 6, 7, 2, 3)),
    "due at once: longest processing time first": (Order(pace=0.0), (6, 2, 3, 5, 4, 0, 1, 7)),
    "due far apart: group by group, the shortest first": (Order(pace=1000.0), (0, 1, 5, 4, 2, 3, 6, 7)),
    "its members as they are": (Order(key=0, share=0.0, sorts_members=False), (6, 7, 2, 3, 4, 5, 0, 1)),
    "due a hundred steps apart": (Order(pace=100.0), (6, 0, 1, 2, 5, 4, 3, 7)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_sequences_have_the_places_of_the_order(name: str) -> None:
    order, want = ORDERS[name]
    assert sequences_in(order, KEYS) == want


FIXED = replace(KEYS, minibatch=np.array([0, 0, 1, 1]))
FIXED_ORDERS = {
    "minibatch by minibatch, of each the longest first": (
        Order(key=0, share=0.0, by_minibatch=True),
        (2, 3, 0, 1, 6, 7, 5, 4),
    ),
    "of all minibatches the longest first": (Order(key=0, share=0.0), (6, 7, 2, 3, 5, 4, 0, 1)),
    "due far apart: by their numbers": (Order(pace=1000.0), (0, 1, 2, 3, 5, 4, 6, 7)),
}


@pytest.mark.parametrize("name", FIXED_ORDERS)
def test_sequences_of_fixed_minibatches_have_the_places_of_the_order(name: str) -> None:
    order, want = FIXED_ORDERS[name]
    assert sequences_in(order, FIXED) == want


def test_only_fixed_minibatches_make_an_order_by_minibatch() -> None:
    rng = np.random.default_rng(2)
    for is_fixed in (False, True):
        drawn = [random_order(1.0, rng, is_fixed=is_fixed) for _ in range(50)]
        changed = [changed_order(Order(), 1.0, rng, is_fixed=is_fixed) for _ in range(100)]
        assert all(any(each.by_minibatch for each in some) == is_fixed for some in (drawn, changed))


def test_any_order_has_every_sequence_once_and_is_reproducible() -> None:
    rng = np.random.default_rng(0)
    orders = [random_order(1.0, rng) for _ in range(20)]
    for _ in range(5):
        orders = [changed_order(order, 1.0, rng) for order in orders]
        for order in orders:
            found = sequences_in(order, KEYS)
            assert sorted(found) == list(range(8))
            assert found == sequences_in(order, KEYS)


def test_a_change_of_an_order_changes_only_the_parameters_of_its_family() -> None:
    rng = np.random.default_rng(1)
    by_levels, by_slack = Order(), Order(pace=20.0)
    of_levels = [changed_order(by_levels, 1.0, rng) for _ in range(200)]
    of_slack = [changed_order(by_slack, 1.0, rng) for _ in range(200)]
    assert {each.share for each in of_levels if each.pace is None} > {0.25}
    assert {each.key for each in of_levels if each.pace is None} == {0, 1, 2}
    assert {round(each.pace) for each in of_slack if each.pace is not None} > {20, 24, 28, 36, 16, 12, 4}
    assert any(one != other for one, other in pairwise(of_slack))
