"""Which engine gets which of the next responses. Pure.

Each response, in the order of the queue, goes to an engine with a place for it. Of these engines:
1. an engine whose KV cache still has room for the whole response comes before one that would be overfull;
2. then the one with the fewest tokens left to generate;
3. then the one with the fewest responses, then the first.

Responses to one prompt thus come to different engines: their lengths are alike, and an engine with all of the longest
prompt's would end last. No engine here keeps a prompt's cache for the next response (docs/engines.md).

A response's tokens are those that it is expected to have. Where nothing is known they are equal, and engines get equal
numbers of responses.

Invariants:
- Every response gets an engine, and no engine more than its places. [test_seating: no_engine_gets_more]
- Equal responses spread evenly over equal engines. [test_seating: equal_responses_spread]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What one response needs of an engine: tokens to generate, and tokens of KV cache at its end."""

    tokens_left: float
    kv_tokens: float


@dataclass(frozen=True, slots=True)
class Room:
    """An engine with the responses that it holds. `kv_capacity_tokens` is 0 where it is not known."""

    num_places: int
    held: tuple[Demand, ...] = ()
    kv_capacity_tokens: int = 0


def seats(rooms: Sequence[Room], demands: Sequence[Demand]) -> list[int]:
    """The index in `rooms` for each demand. There are places for all."""
    assert len(demands) <= sum(room.num_places for room in rooms), "take no more than there are places"
    left = [sum(demand.tokens_left for demand in room.held) for room in rooms]
    kv = [sum(demand.kv_tokens for demand in room.held) for room in rooms]
    num_held = [len(room.held) for room in rooms]
    most = [num_held[index] + room.num_places for index, room in enumerate(rooms)]

    def rank(index: int, demand: Demand) -> tuple[bool, float, int, int]:
        capacity = rooms[index].kv_capacity_tokens
        is_overfull = 0 < capacity < kv[index] + demand.kv_tokens
        return is_overfull, left[index], num_held[index], index

    chosen = []
    for demand in demands:
        _, _, _, index = min(rank(each, demand) for each in range(len(rooms)) if num_held[each] < most[each])
        left[index] += demand.tokens_left
        kv[index] += demand.kv_tokens
        num_held[index] += 1
        chosen.append(index)
    return chosen
