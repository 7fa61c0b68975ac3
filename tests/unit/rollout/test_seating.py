"""Seating: responses go where the fewest tokens are left, and where their keys and values fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.seating import Demand, Room, seats


def demand(tokens: float, *, prompt: int = 0, prompt_tokens: int = 0) -> Demand:
    return Demand(prompt, tokens, tokens, prompt_tokens)


def test_a_response_goes_to_the_engine_with_the_fewest_tokens_left_not_the_fewest_responses() -> None:
    rooms = [Room(4, held=(demand(900),)), Room(4, held=(demand(10), demand(10), demand(10)))]
    assert seats(rooms, [demand(100, prompt=1), demand(100, prompt=2)]) == [1, 1]


def test_an_engine_whose_cache_would_be_overfull_comes_last() -> None:
    rooms = [Room(4, kv_capacity_tokens=150), Room(4, held=(demand(500),), kv_capacity_tokens=1000)]
    assert seats(rooms, [demand(100, prompt=1), demand(100, prompt=2)]) == [0, 1]


def test_responses_to_a_short_prompt_spread_as_those_to_several_do() -> None:
    rooms = [Room(8), Room(8)]
    draws = [demand(10, prompt=prompt, prompt_tokens=10) for prompt in (0, 1) for _ in range(4)]
    assert seats(rooms, draws) == [0, 1, 0, 1, 0, 1, 0, 1]


def test_responses_to_a_long_prompt_stay_together_up_to_an_equal_share() -> None:
    rooms = [Room(8), Room(8)]
    draws = [demand(10, prompt=prompt, prompt_tokens=11) for prompt in (0, 1) for _ in range(4)]
    assert seats(rooms, draws) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert seats(rooms, draws[:4]) == [0, 0, 1, 1]


@given(st.integers(1, 5), st.integers(0, 12))
def test_equal_responses_spread_evenly_over_equal_engines(num_engines: int, num_responses: int) -> None:
    chosen = seats([Room(12)] * num_engines, [demand(7, prompt=each) for each in range(num_responses)])
    counts = [chosen.count(index) for index in range(num_engines)]
    assert max(counts) - min(counts) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), max_size=24),
)
def test_every_response_gets_an_engine_and_no_engine_gets_more_than_its_places(
    engines: list[tuple[int, int]], responses: list[tuple[int, int]]
) -> None:
    rooms = [Room(num_places, held=(demand(left),), kv_capacity_tokens=500) for num_places, left in engines]
    demands = [demand(tokens, prompt=prompt) for prompt, tokens in responses]
    demands = demands[: sum(room.num_places for room in rooms)]
    chosen = seats(rooms, demands)
    assert len(chosen) == len(demands)
    assert all(chosen.count(index) <= room.num_places for index, room in enumerate(rooms))
