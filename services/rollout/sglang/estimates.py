"""Estimates the lengths of requests inside a server that reports only finished responses. Pure.

All running requests get one token per step, so older requests have more tokens:

    length = partial + made * age / sum of ages

- made: the tokens in the KV cache, minus the prompts and partials of the running requests, and at least 0. It may come
  out below 0 where prompts share their cache.
- age: the time since the request was sent; the sum is over the running requests.
- partial: the tokens that the request came with. A waiting request has only these.

The requests that were sent first are taken as the running ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.engine import RequestId


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request inside the server, `age_s` after it was sent."""

    id: RequestId
    num_prompt_tokens: int
    num_partial_tokens: int
    max_new_tokens: int
    age_s: float


def estimated_lengths(inside: Sequence[SentRequest], *, num_running: int, num_used_tokens: int) -> dict[RequestId, int]:
    """The estimated lengths by request.

    Each is below `max_new_tokens`, for the request would have come out otherwise."""
    running = sorted(inside, key=lambda each: -each.age_s)[:num_running]
    num_known = sum(each.num_prompt_tokens + each.num_partial_tokens for each in running)
    num_made = max(0, num_used_tokens - num_known)
    total_s = sum(each.age_s for each in running)
    made = {each.id: round(num_made * each.age_s / total_s) for each in running} if total_s > 0 else {}
    return {each.id: min(each.max_new_tokens - 1, each.num_partial_tokens + made.get(each.id, 0)) for each in inside}
