"""In which order prompts go to engines when an iteration opens. Pure."""

from __future__ import annotations

import numpy as np

from services.scheduler.policy.opening_order import by_minibatch, short_between_long
from services.scheduler.policy.situation import Situation
from services.scheduler.state.observed import Ints
from tidegate.types import MinibatchOrder


def queue_in(situation: Situation, order: tuple[int, ...]) -> Ints:
    """The waiting sequences, sorted by an order of prompts."""
    picture = situation.generation
    queue = picture.in_queue
    place = np.full(picture.num_groups, len(order), dtype=np.int64)
    place[list(order)] = np.arange(len(order))
    ordered: Ints = queue[np.argsort(place[queue // picture.group_size], kind="stable")]
    return ordered


def order_at_opening(situation: Situation, *, short_share: float, shorts_a_long: int) -> tuple[int, ...]:
    """The order of prompts with which an iteration opens."""
    if situation.spec.minibatch_order is MinibatchOrder.FIXED:
        return by_minibatch(situation)
    return short_between_long(situation, short_share, shorts_a_long=shorts_a_long)
