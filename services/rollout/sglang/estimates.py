"""How far requests inside a server are that tells of finished responses only. Pure.

All that run get a token a step, so those that run longer have more: the tokens in the KV cache that are no prompts are
shared out by the time since each was sent. What waits has what it came with. Those sent first run first.
Prompts that share their cache make the sum too small, which is then taken as nothing rather than below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.engine import RequestId


@dataclass(frozen=True, slots=True)
class Spent:
    """A request inside, `age_s` after it was sent."""

    id: RequestId
    num_prompt_tokens: int
    num_partial_tokens: int
    max_new_tokens: int
    age_s: float


def estimated_lengths(inside: Sequence[Spent], *, num_running: int, num_used_tokens: int) -> dict[RequestId, int]:
    """Each below `max_new_tokens`: it would have come out."""
    running = sorted(inside, key=lambda each: -each.age_s)[:num_running]
    num_known = sum(each.num_prompt_tokens + each.num_partial_tokens for each in running)
    num_made = max(0, num_used_tokens - num_known)
    total_s = sum(each.age_s for each in running)
    made = {each.id: round(num_made * each.age_s / total_s) for each in running} if total_s > 0 else {}
    return {each.id: min(each.max_new_tokens - 1, each.num_partial_tokens + made.get(each.id, 0)) for each in inside}
