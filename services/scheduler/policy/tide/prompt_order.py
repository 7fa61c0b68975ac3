"""In which order prompts go to engines. Pure.

Where hints tell prompts apart, the iteration opens with an order by them, which stays (`opening_order`). Where they do
not, and minibatches take groups as they come, responses tell it:

1. The first prompts go as they are, each with all its responses: their groups feed the trainer early.
2. One response of each other prompt, a probe (Seer, arXiv 2511.14617).
3. The other responses of these, in the order that hints would give, by what probes have shown so far.

Such an order is made anew from time to time, from all responses so far, finished and unfinished (`final_lengths`).

Invariants:
- An order has every prompt, and a probed one twice. [test_prompt_order: has_every_prompt_and_a_probed_one_twice]
- Prompts whose probes are long come before others. [test_prompt_order: probes_are_long_come_first]
- With hints that tell prompts apart, in a fixed order, and where no response waits, nothing is probed.
  [test_prompt_order: nothing_is_probed]
"""

from __future__ import annotations

import numpy as np

from services.scheduler.policy.lengths_law import final_lengths
from services.scheduler.policy.opening_order import (
    by_minibatch,
    hints_tell_apart,
    longest_first,
    mixed,
    short_between_long,
)
from services.scheduler.policy.situation import Situation
from services.scheduler.state.observed import Ints
from tidegate.order_of_responses import responses_in
from tidegate.types import MinibatchOrder

WHOLE_SHARE = 0.25
"""The share of the prompts that go first with all their responses: with none of them the trainer starts later. With a
quarter iterations end 0.7 % sooner than without probes, with a half 0.2 %, with three quarters no sooner (means of
eight settings on six seeds)."""


def queue_in(situation: Situation, order: tuple[int, ...]) -> Ints:
    """The waiting sequences, sorted by an order of prompts."""
    picture = situation.generation
    queue, size = picture.in_queue, picture.group_size
    responses = np.array([group * size + draw for group, draw in responses_in(order, size)], dtype=np.int64)
    place = np.full(picture.num_groups * size, responses.size, dtype=np.int64)
    place[responses] = np.arange(responses.size)
    ordered: Ints = queue[np.argsort(place[queue], kind="stable")]
    return ordered


def orders_at_opening(situation: Situation, *, short_share: float, shorts_a_long: int) -> tuple[tuple[int, ...], ...]:
    """The orders of prompts with which an iteration may open. In a fixed order of minibatches those of the first one
    let the trainer start early, and the longest of all leave no long tail."""
    if situation.spec.minibatch_order is MinibatchOrder.FIXED:
        return tuple(dict.fromkeys((by_minibatch(situation), longest_first(situation))))
    order = short_between_long(situation, short_share, shorts_a_long=shorts_a_long)
    return (order or probing_order(situation, short_share=short_share, shorts_a_long=shorts_a_long),)


def probing_order(situation: Situation, *, short_share: float, shorts_a_long: int) -> tuple[int, ...]:
    """The order by what probes have shown. Empty where nothing is probed."""
    picture = situation.generation
    is_fixed = situation.spec.minibatch_order is MinibatchOrder.FIXED
    if is_fixed or picture.group_size == 1 or not picture.in_queue.size or hints_tell_apart(situation):
        return ()
    tokens = final_lengths(picture, situation.law_in_force, is_spread=False).reshape(-1, picture.group_size).sum(axis=1)
    # Of the prompts that the iteration began with: one that was probed stays so when others are added.
    num_whole = round(WHOLE_SHARE * situation.spec.num_prompts)
    probed = np.arange(num_whole, tokens.size)
    longest = probed[np.argsort(-tokens[probed], kind="stable")]
    others = mixed(longest, short_share, shorts_a_long=shorts_a_long)
    return (*range(num_whole), *probed.tolist(), *others)
