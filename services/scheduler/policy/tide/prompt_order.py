"""In which order prompts go to engines, at the start and when engines hand sequences back. Pure.

When an engine leaves, its sequences are given out again. As many groups as the next minibatch needs come first, the
group that is complete soonest before the others. The other groups follow longest first. Where minibatches have fixed
groups, those of the next minibatch come first, then those of the one after it; of each the longest first.

Invariants:
- An order has every group with unfinished sequences once. [test_prompt_order: has_every_unfinished_group_once]
- With fixed minibatches no group comes before one of an earlier minibatch that an engine works on.
  [test_prompt_order: of_fixed_minibatches]
"""

from __future__ import annotations

import numpy as np

from services.scheduler.policy.lengths_law import final_lengths
from services.scheduler.policy.opening_order import by_minibatch, longest_first, short_between_long
from services.scheduler.policy.situation import Situation, minibatch_of, minibatch_sizes
from services.scheduler.policy.supported_law import supported_law
from services.scheduler.policy.tide.cluster import can_move
from services.scheduler.state.observed import Ints
from tidegate.types import MinibatchOrder


def queue_in(situation: Situation, order: tuple[int, ...]) -> Ints:
    """The waiting sequences, sorted by an order of prompts."""
    picture = situation.generation
    queue = np.array(picture.queue, dtype=np.int64)
    place = np.full(picture.num_groups, len(order), dtype=np.int64)
    place[list(order)] = np.arange(len(order))
    ordered: Ints = queue[np.argsort(place[queue // picture.group_size], kind="stable")]
    return ordered


def opening_orders(situation: Situation, *, short_share: float, shorts_a_long: int) -> tuple[tuple[int, ...], ...]:
    """The orders with which an iteration may open; their forecasts choose. With `arrival` it is one: others differ by
    less than a forecast's error."""
    if situation.spec.minibatch_order is MinibatchOrder.FIXED:
        return by_minibatch(situation), longest_first(situation)
    return (short_between_long(situation, short_share, shorts_a_long=shorts_a_long),)


def order_back(situation: Situation) -> tuple[int, ...]:
    """The order when engines hand sequences back: groups that an engine works on, then the queue as it is."""
    picture, training = situation.generation, situation.trainer.training
    final = final_lengths(picture, supported_law(picture, situation.lengths), is_spread=False)
    left = np.where(picture.is_unfinished, final - picture.length_of, 0.0).reshape(-1, picture.group_size).max(axis=1)
    queued = dict.fromkeys((np.array(picture.queue, dtype=np.int64) // picture.group_size).tolist())
    running = [group for group in np.argsort(left, kind="stable").tolist() if left[group] > 0 and group not in queued]
    if situation.spec.minibatch_order is MinibatchOrder.FIXED:
        own = minibatch_of(picture.num_groups, situation.spec.num_minibatches)
        return (*sorted(running, key=lambda group: (int(own[group]), -float(left[group]), group)), *queued)
    sizes = minibatch_sizes(picture.num_groups, situation.spec.num_minibatches)
    coming = training.num_minibatches_done + (not can_move(situation))
    if coming >= len(sizes) - 1:
        return (*running[::-1], *queued)
    needed = max(0, sum(sizes[: coming + 1]) - int((picture.unfinished_by_group == 0).sum()))
    return (*running[:needed], *running[needed:][::-1], *queued)
