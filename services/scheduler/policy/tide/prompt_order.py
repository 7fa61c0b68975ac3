"""In which order prompts are given to engines, at the start and when engines hand sequences back. Pure.

At the start the longest prompts and some of the shortest come first, one of each in turn: the longest bind the end of
the iteration, because a response cannot be made faster than a token a step, and the shortest complete groups early, on
which a few GPUs train while most still generate. What comes back from an engine that left is given out again by when
its group will be complete, soonest first, as far as the next minibatch needs groups; the others longest first, as at
the start.

Hints that are off by more than prompts differ put long prompts last that nobody takes for long: with a spread of 0.5
and hints off by 0.6 such an order ended the published iteration 4 to 12 % later than none.

Invariants: every group is in an order once; without hints, or with such, the start has none.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.policy.lengths_law import final_lengths, prior
from services.scheduler.policy.outlook import minibatch_sizes
from services.scheduler.policy.situation import Situation
from services.scheduler.state.observed import Ints


def short_between_long(situation: Situation, short_share: float, *, shorts_a_long: int = 1) -> tuple[int, ...]:
    """`short_share` of the prompts, the shortest by their hints, `shorts_a_long` of them before each of the longest.
    Empty without hints that tell prompts apart: it stays as it is."""
    law = situation.lengths
    if not situation.generation.hints or law.sigma_hint > law.sigma_prompt:
        return ()
    level, _ = prior(situation.generation, situation.lengths)
    longest = np.argsort(-level, kind="stable")
    num = round(short_share * longest.size)
    short, rest = longest[::-1][:num], longest[: longest.size - num]
    # Places on one line: the k-th short one before the k // shorts_a_long-th of the rest.
    place = np.concatenate((np.arange(num) // shorts_a_long - 0.5, np.arange(rest.size)))
    order = np.concatenate((short, rest))[np.argsort(place, kind="stable")]
    return tuple(order.tolist())


def queue_in(situation: Situation, order: tuple[int, ...]) -> Ints:
    """The sequences that wait, in an order of prompts."""
    told = situation.generation
    queue = np.array(told.queue, dtype=np.int64)
    place = np.full(told.num_groups, len(order), dtype=np.int64)
    place[list(order)] = np.arange(len(order))
    ordered: Ints = queue[np.argsort(place[queue // told.group_size], kind="stable")]
    return ordered


def order_back(situation: Situation) -> tuple[int, ...]:
    """Groups that an engine works on, then the queue as it is."""
    told, training = situation.generation, situation.trainer.training
    final = final_lengths(told, situation.lengths, is_spread=False)
    left = np.where(told.is_unfinished, final - told.length_of, 0.0).reshape(-1, told.group_size).max(axis=1)
    queued = dict.fromkeys((np.array(told.queue, dtype=np.int64) // told.group_size).tolist())
    running = [group for group in np.argsort(left, kind="stable").tolist() if left[group] > 0 and group not in queued]
    sizes = minibatch_sizes(told.num_groups, situation.spec.num_minibatches)
    coming = training.num_minibatches_done + (not training.is_at_boundary)
    if coming >= len(sizes) - 1:
        return (*running[::-1], *queued)
    needed = max(0, sum(sizes[: coming + 1]) - int((told.unfinished_by_group == 0).sum()))
    return (*running[:needed], *running[needed:][::-1], *queued)
