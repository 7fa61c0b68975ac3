"""Which engine gets which of the next responses. Pure.

Each response, in the order of the queue, goes to an engine with a place for it. Of these engines:
1. an engine whose KV cache still has room for the whole response comes before one that would be overfull;
2. then the one with the fewest tokens left to generate;
3. then the one with the fewest responses, then the first.

Responses to one prompt thus come to different engines: their lengths are alike, and an engine with all of the longest
prompt's would end last. Where the prompt is longer than what they are expected to generate, they stay together, so that
an engine can share the prompt's cache, as long as it has no more than its equal share of the tokens.

A response's tokens are those that it is expected to have. Where nothing is known they are equal, and engines get equal
numbers of responses.

Invariants:
- Every response gets an engine, and no engine more than its places. [test_seating: no_engine_gets_more]
- Equal responses spread evenly over equal engines. [test_seating: equal_responses_spread]
- Responses to a short prompt spread as those to several do. [test_seating: responses_to_a_short_prompt_spread]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What one response needs of an engine: tokens to generate, and tokens of KV cache at its end, prompt excluded."""

    prompt: int
    tokens_left: float
    kv_tokens: float
    prompt_tokens: int = 0


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

    share = (sum(left) + sum(demand.tokens_left for demand in demands)) / max(len(rooms), 1)
    prompt, index = -1, 0

    def rank(index: int, demand: Demand) -> tuple[bool, float, int, int]:
        capacity = rooms[index].kv_capacity_tokens
        is_overfull = 0 < capacity < kv[index] + demand.kv_tokens
        return is_overfull, left[index], num_held[index], index

    chosen = []
    for demand in demands:
        is_within = num_held[index] < most[index] and left[index] + demand.tokens_left <= share
        stays = demand.prompt == prompt and demand.prompt_tokens > demand.tokens_left
        if not (stays and is_within):
            _, _, _, index = min(rank(each, demand) for each in range(len(rooms)) if num_held[each] < most[each])
        prompt = demand.prompt
        left[index] += demand.tokens_left
        kv[index] += demand.kv_tokens
        num_held[index] += 1
        chosen.append(index)
    return chosen
