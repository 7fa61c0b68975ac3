"""The rest of an iteration on an axis on which no layout matters: virtual decode steps. Pure.

All running sequences gain one token a decode step. So a sequence that still makes r tokens ends r steps after its
start, under any layout; the layout sets only the seconds of a step and the number of slots. A waiting sequence starts
when another one gives its slot back, and slots come back in proportion to their number.

So the queue is started once, by list scheduling with the present slots, on an axis u of steps. With other slots

    du/dstep = slots / present slots     while sequences wait
    du/dstep = 1                         afterwards

and the seconds of a step follow from the layout (`tide/forecast`). One outlook is made for each decision; every plan
reads it.

Order:
1. Start and end of each sequence, in u.
2. On a grid of u: how many sequences run, and how many KV tokens they have.
3. Groups that are in the same minibatch, or end close to each other, are put together to lots. A plan then costs the
   same for 128 groups and for 8,192.

Invariants:
- The groups of a lot have all started, or all wait. [test_outlook: either_all_started_or_all_wait]
- A group that the trainer took is in no lot. [test_outlook: every_group_that_is_not_taken]
- In a fixed order a group can be trained once those before it can. [test_outlook: in_a_fixed_order_a_group_waits]
- Groups that inference handed on come first, then complete groups. [test_outlook: handed_on_come_first]

Assumptions:
- Waiting sequences start in the order of the queue.
- Steps take the same time on every engine.
- A sequence that is away comes back at once.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.scheduler.policy.situation import Situation, minibatch_of, minibatch_sizes
from services.scheduler.state.observed import QUEUED, Floats, Generation, Ints
from tidegate.types import MinibatchOrder

LOTS = 64
"""The most lots. More lots change no forecast end by a second; fewer do."""

GRID = 128
"""The number of intervals of u."""

NO_STEPS = 1e-9
"""The length of the one interval of a rollout that is over. It is so short that no plan waits for it."""

BLOCKS = 512
"""A queue is started in at most so many blocks. Thousands of sequences one by one would take milliseconds."""


@dataclass(frozen=True)
class Load:
    """What runs with `num_slots` slots, by interval of u.

    step: the steps of one interval.
    running, kv_tokens, num_ended: sequences that run, the KV tokens that they have, sequences that have ended.
    rest: the mean of the steps that the running ones still make.
    queue_until: the queue is empty from this u on.
    """

    step: float
    running: Floats
    kv_tokens: Floats
    rest: Floats
    num_ended: Floats
    num_slots: float
    queue_until: float

    @property
    def last(self) -> float:
        """When the last sequence ends."""
        return self.step * self.running.size


@dataclass(frozen=True)
class Lots:
    """Groups that the forecast treats as one.

    starts: in u; -1 for a lot that has started.
    steps: from the start, or from now, to the end.
    tokens: of the responses.
    ended_tokens: of those that have ended.
    last_tokens: of the last response of each group.
    longest_tokens: of the longest of these last responses.
    minibatch: the one that takes the lot, counted from the first that is not done, an open one included.
    due_tokens: of the groups that the trainer can take once this lot is handed on. With `arrival` they are the lot's
      own. In a fixed order the trainer takes groups by their numbers, and none before those that come before it.
    """

    starts: Floats
    steps: Floats
    tokens: Floats
    due_tokens: Floats
    ended_tokens: Floats
    last_tokens: Floats
    longest_tokens: Floats
    is_ended: NDArray[np.bool_]
    is_handed_on: NDArray[np.bool_]
    minibatch: Ints


@dataclass(frozen=True)
class Outlook:
    """`until[k]`: how many lots the first k + 1 of the remaining minibatches take together. `streams`: a minibatch
    begins with its first lot."""

    load: Load
    lots: Lots
    until: tuple[int, ...]
    is_by_arrival: bool
    streams: bool = True
    num_tokens_ahead: float | None = None
    """Tokens that inference has scored of groups that have not ended. None: it does not score ahead."""

    unevenness: float = 0.0
    """The longest of n responses has n**unevenness times the tokens of their mean, for n up to a few groups."""

    def tokens_of(self, minibatch: int) -> float:
        """The tokens of the minibatch's lots. With `arrival` the lots are those of the outlook's order."""
        tokens = self.lots.tokens
        if self.is_by_arrival:
            return float(tokens[self.until[minibatch - 1] if minibatch else 0 : self.until[minibatch]].sum())
        return float(tokens[self.lots.minibatch == minibatch].sum())


def outlook(situation: Situation, final: Floats, *, num_slots: int, waiting: Ints | None = None) -> Outlook:
    """`final`: the lengths that all sequences end with. `waiting`: the queue in another order; None keeps its own."""
    picture = situation.generation
    context = context_tokens(picture)
    queue = picture.in_queue if waiting is None else waiting
    left = np.where(picture.is_unfinished, final - picture.length_of, 0.0)
    starts = np.zeros(left.size)
    if queue.size:
        runs = picture.is_unfinished & (picture.place_of != QUEUED)
        starts[queue] = started(np.sort(left[runs]), left[queue], max(1, num_slots))
    open_at = np.flatnonzero(picture.is_unfinished)
    ends = starts + left
    cached = (picture.length_of[open_at] + context).astype(np.float64)
    load = _load(starts[open_at], ends[open_at], cached, max(1, num_slots))
    lots, until = _lots(situation, starts, ends, final)
    spec = situation.spec
    ahead = float(situation.inference.inferring.num_tokens_ahead) if spec.scores_ahead else None
    return Outlook(
        load,
        lots,
        until,
        spec.minibatch_order is MinibatchOrder.ARRIVAL,
        spec.streams,
        ahead,
        _unevenness(final.reshape(-1, spec.group_size)),
    )


def _unevenness(groups: Floats) -> float:
    """`groups`: [group, response] tokens. Of 2 to some 32 normal values the expected largest is about linear in the
    logarithm of their number."""
    size, mean = groups.shape[1], float(groups.mean())
    return math.log(float(groups.max(axis=1).mean()) / mean) / math.log(size) if size > 1 and mean else 0.0


def context_tokens(picture: Generation) -> float:
    """KV tokens of a sequence besides those that it generated; 0 while no sequence runs from which to know."""
    num = picture.num_submitted
    if not num:
        return 0.0
    cached = sum(engine.num_kv_tokens for engine in picture.engines)
    return max(0.0, cached - float(picture.length_of[picture.place_of >= 0].sum())) / num


def started(running: Floats, waiting: Floats, num_slots: int) -> Floats:
    """When each waiting sequence starts: list scheduling (Graham 1969) gives it the slot that is free first.

    `running`: the ends of the running sequences, sorted. Each holds a slot; those beyond
    `num_slots` share the slots of the others. `waiting`: steps of each sequence of the queue.
    """
    width = max(1, -(-waiting.size // BLOCKS))
    # Avoid a list of slots that nobody needs: an engine may claim billions.
    num_slots = min(num_slots, running.size + waiting.size + width)
    free = np.zeros(max(0, num_slots - running.size))
    slots = np.concatenate((free, running))[:num_slots]
    heap = slots[width // 2 :: width].tolist() or [float(slots.mean())]
    heapq.heapify(heap)
    starts = np.empty(waiting.size)
    for at in range(0, waiting.size, width):
        block = waiting[at : at + width]
        start = heap[0]
        starts[at : at + width] = start
        # The middle sequence stands for its block: their mean ends later than the first, and earlier than the last.
        heapq.heapreplace(heap, start + float(block[block.size // 2]))
    return starts


def _load(starts: Floats, ends: Floats, cached: Floats, num_slots: int) -> Load:
    """`cached`: the KV tokens of each sequence at its start."""
    queue_until = float(starts.max(initial=0.0))
    if not ends.size:
        none = np.zeros(1)
        return Load(NO_STEPS, none, none, none, none, num_slots, queue_until)
    step = float(ends.max()) / GRID
    middles = (np.arange(GRID) + 0.5) * step
    begins, finishes = _intervals(starts, step), _intervals(ends, step)
    num_ended = _until(finishes)
    running = _until(begins) - num_ended
    base = cached - starts
    kv_tokens = _until(begins, base) - _until(finishes, base) + running * middles
    to_come = (_until(begins, ends) - _until(finishes, ends) - running * middles) / np.maximum(running, 1.0)
    return Load(step, running, kv_tokens, to_come, num_ended, num_slots, queue_until)


def _intervals(at: Floats, step: float) -> Ints:
    """By place: the first interval whose middle is not before it."""
    return np.minimum((at / step + 0.5).astype(np.int64), GRID)


def _until(place: Ints, weights: Floats | None = None) -> Floats:
    """By interval: the sum of the weights of the places before its middle, or their number."""
    summed: Floats = np.cumsum(np.bincount(place, weights=weights, minlength=GRID + 1))[:-1].astype(np.float64)
    return summed


def _lots(situation: Situation, starts: Floats, ends: Floats, final: Floats) -> tuple[Lots, tuple[int, ...]]:
    picture = situation.generation
    size, sizes = picture.group_size, left_sizes(situation)
    by_group = ends.reshape(-1, size)
    last = by_group.argmax(axis=1)
    group_ends = by_group[np.arange(picture.num_groups), last]
    group_starts = starts.reshape(-1, size)[np.arange(picture.num_groups), last]
    by_member = final.reshape(-1, size)
    ended = np.where(picture.is_unfinished, 0.0, final).reshape(-1, size).sum(axis=1)
    last_tokens = by_member[np.arange(picture.num_groups), last]
    minibatch = _minibatch_of(situation)
    order, is_ready = _in_order(situation, group_starts, group_ends, minibatch)
    width = max(1, -(-order.size // LOTS))
    is_open = picture.unfinished_by_group > 0
    kinds = (group_starts[order] > 0, is_open[order], is_ready[order], minibatch[order])
    first = np.flatnonzero(_is_first(kinds, width))
    if not first.size:
        none, no_bool, no_int = np.zeros(0), np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.int64)
        return Lots(none, none, none, none, none, none, none, no_bool, no_bool, no_int), (0,) * len(sizes)
    end = np.maximum.reduceat(group_ends[order], first)
    start = np.minimum.reduceat(group_starts[order], first)
    tokens = by_member.sum(axis=1)
    tokens_of_lots = np.add.reduceat(tokens[order], first)
    is_fixed = situation.spec.minibatch_order is MinibatchOrder.FIXED
    lots = Lots(
        starts=np.where(start > 0, start, -1.0),
        steps=end - start,
        tokens=tokens_of_lots,
        due_tokens=_due_tokens(order, first, end, minibatch, tokens) if is_fixed else tokens_of_lots,
        ended_tokens=np.add.reduceat(ended[order], first),
        last_tokens=np.add.reduceat(last_tokens[order], first),
        longest_tokens=np.maximum.reduceat(last_tokens[order], first),
        is_ended=end <= 0,
        is_handed_on=is_ready[order][first],
        minibatch=minibatch[order][first],
    )
    return lots, tuple(np.searchsorted(first, np.cumsum(sizes)).tolist())


def _due_tokens(order: Ints, first: Ints, ends: Floats, minibatch: Ints, tokens: Floats) -> Floats:
    """By lot: the tokens of the groups that wait for this lot last, of those with their number or a lower one."""
    by_end = np.argsort(ends, kind="stable")
    place = np.argsort(by_end, kind="stable")
    lot = np.repeat(np.arange(first.size), np.diff(np.append(first, order.size)))
    by_number = np.argsort(order)
    groups: Ints = order[by_number]
    until: Ints = place[lot[by_number]]
    for nth in np.unique(minibatch[groups]):
        own = minibatch[groups] == nth
        until[own] = np.maximum.accumulate(until[own])
    due: Floats = np.bincount(by_end[until], weights=tokens[groups], minlength=first.size).astype(np.float64)
    return due


def left_sizes(situation: Situation) -> tuple[int, ...]:
    """By minibatch that is open or to come: the groups that it has not taken yet. A closed one has none."""
    training, picture = situation.trainer.training, situation.generation
    sizes = minibatch_sizes(picture.num_groups, situation.spec.num_minibatches)
    done = training.num_minibatches_done
    if training.is_at_boundary or done >= len(sizes):
        return sizes[done:]
    open_left = sum(sizes[: done + 1]) - training.num_taken
    return (max(0, open_left), *sizes[done + 1 :])


def _in_order(situation: Situation, starts: Floats, ends: Floats, minibatch: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """The groups that are not taken, and by group whether inference handed it on.

    Their order: handed on, complete (by their numbers: which of them ended first is not known), running (in the order
    of their ends), waiting (in the order of their starts).
    """
    training, ready = situation.trainer.training, np.array(situation.inference.inferring.ready, dtype=np.int64)
    is_open = situation.generation.unfinished_by_group > 0
    key = np.where(starts > 0, 1.0, np.where(is_open, 0.0, -1.0))
    place = np.where(starts > 0, starts, np.where(is_open, ends, 0.0))
    key[ready], place[ready] = -2.0, np.arange(ready.size)
    is_ready, is_taken = np.zeros(ends.size, dtype=np.bool_), np.zeros(ends.size, dtype=np.bool_)
    is_fixed = situation.spec.minibatch_order is MinibatchOrder.FIXED
    taken = (np.sort(ready) if is_fixed else ready)[: training.num_taken]
    is_ready[ready], is_taken[taken] = True, True
    order = np.lexsort((place, minibatch, key))
    return order[~is_taken[order]], is_ready


def _minibatch_of(situation: Situation) -> Ints:
    """By group: the minibatch that takes it, counted from the first that is not done. With `arrival` this depends on
    the plan, and is 0 here."""
    num_groups, spec = situation.generation.num_groups, situation.spec
    if spec.minibatch_order is MinibatchOrder.ARRIVAL:
        return np.zeros(num_groups, dtype=np.int64)
    own = minibatch_of(num_groups, spec.num_minibatches) - situation.trainer.training.num_minibatches_done
    return np.maximum(own, 0)


def _is_first(kinds: tuple[NDArray[Any], ...], width: int) -> NDArray[np.bool_]:
    """By group of an order: whether it begins a lot. A lot has groups of one kind, at most `width` of them."""
    here = np.arange(kinds[0].size)
    changes = np.ones(here.size, dtype=np.bool_)
    for kind in kinds:
        changes[1:] &= kind[1:] == kind[:-1]
    changes = ~changes
    changes[:1] = True
    begin = np.maximum.accumulate(np.where(changes, here, 0))
    is_first: NDArray[np.bool_] = (here - begin) % width == 0
    return is_first
