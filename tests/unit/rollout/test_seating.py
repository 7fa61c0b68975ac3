"""Seating: responses go where the fewest tokens are left, and where their keys and values fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.seating import Demand, Room, seats


def demand(tokens: float) -> Demand:
    return Demand(tokens, tokens)


def test_a_response_goes_to_the_engine_with_the_fewest_tokens_left_not_the_fewest_responses() -> None:
    rooms = [Room(4, held=(demand(900),)), Room(4, held=(demand(10), demand(10), demand(10)))]
    assert seats(rooms, [demand(100), demand(100)]) == [1, 1]


def test_an_engine_whose_cache_would_be_overfull_comes_last() -> None:
    rooms = [Room(4, kv_capacity_tokens=150), Room(4, held=(demand(500),), kv_capacity_tokens=1000)]
    assert seats(rooms, [demand(100), demand(100)]) == [0, 1]


def test_equal_responses_go_to_engines_in_turn() -> None:
    assert seats([Room(8), Room(8)], [demand(10)] * 6) == [0, 1, 0, 1, 0, 1]


@given(st.integers(1, 5), st.integers(0, 12))
def test_equal_responses_spread_evenly_over_equal_engines(num_engines: int, num_responses: int) -> None:
    chosen = seats([Room(12)] * num_engines, [demand(7)] * num_responses)
    counts = [chosen.count(index) for index in range(num_engines)]
    assert max(counts) - min(counts) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), min_size=1, max_size=6),
    st.lists(st.integers(1, 400), max_size=24),
)
def test_every_response_gets_an_engine_and_no_engine_gets_more_than_its_places(
    engines: list[tuple[int, int]], responses: list[int]
) -> None:
    rooms = [Room(num_places, held=(demand(left),), kv_capacity_tokens=500) for num_places, left in engines]
    demands = [demand(tokens) for tokens in responses]
    demands = demands[: sum(room.num_places for room in rooms)]
    chosen = seats(rooms, demands)
    assert len(chosen) == len(demands)
    assert all(chosen.count(index) <= room.num_places for index, room in enumerate(rooms))
