"""What is left of an iteration, on axes on which no layout matters: virtual decode steps. Pure.

Everything that runs gains one token a decode step, so a sequence that still makes r tokens ends r steps after it
started, on any layout; a layout only says how long a step is, and how many slots there are. What waits starts when a
slot is given back, and slots are given back in proportion to their number. So the queue is started once, by list
scheduling with the slots of now, on an axis u of steps; with another number of slots u runs slots/slots-of-now as fast
while sequences wait, and as fast as steps do afterwards (`forecast`). Built once a decision, read by every plan.

Order: starts and ends in u; on a grid of u, how many run and how many KV tokens they hold; groups of one minibatch, or
with one another's ends, put together to lots, so that a plan costs the same for 128 groups as for 8,192.

Invariants: a lot's groups have all started, or all wait; groups that the trainer took are in none; what is handed on
comes first, then what is complete.
Assumptions: a waiting sequence starts in the queue's order; steps are as long on every engine; a sequence that is away
comes back at once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.scheduler.policy.situation import Situation
from services.scheduler.state.observed import QUEUED, Floats, Generation, Ints
from tidegate.types import MinibatchOrder

LOTS = 64
"""In which the groups that are left are forecast: more changes no end by a second, less does."""

GRID = 128
"""Intervals of u."""

BLOCKS = 512
"""In which a queue is started: one after the other, thousands would take milliseconds."""


@dataclass(frozen=True)
class Load:
    """With `num_slots`, by interval of u of `step` steps each: how many run, what they cache, the steps that they still
    make in the mean, how many have ended. The queue is empty from `queue_until` on."""

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
    """`starts` in u, -1 for what has started; `steps` from a start, or now, to the end; `minibatch` counts those left,
    an open one included."""

    starts: Floats
    steps: Floats
    tokens: Floats
    is_ended: NDArray[np.bool_]
    is_handed_on: NDArray[np.bool_]
    minibatch: Ints


@dataclass(frozen=True)
class Outlook:
    """`until[k]`: how many lots the first k + 1 minibatches that are left take together."""

    load: Load
    lots: Lots
    until: tuple[int, ...]
    is_by_arrival: bool


def outlook(situation: Situation, final: Floats, *, num_slots: int, waiting: Ints | None = None) -> Outlook:
    """`final` are the lengths that all end with; `waiting`: the queue in another order than its own."""
    told = situation.generation
    context = context_tokens(told)
    queue = np.array(told.queue, dtype=np.int64) if waiting is None else waiting
    left = np.where(told.is_unfinished, final - told.length_of, 0.0)
    starts = np.zeros(left.size)
    if queue.size:
        runs = told.is_unfinished & (told.place_of != QUEUED)
        starts[queue] = started(np.sort(left[runs]), left[queue], max(1, num_slots))
    open_at = np.flatnonzero(told.is_unfinished)
    ends = starts + left
    base = told.length_of[open_at] + context - starts[open_at]
    load = _load(starts[open_at], ends[open_at], base, max(1, num_slots))
    lots, until = _lots(situation, starts, ends, final, context)
    return Outlook(load, lots, until, situation.spec.minibatch_order is MinibatchOrder.ARRIVAL)


def context_tokens(told: Generation) -> float:
    """Of a sequence, besides what it has generated; 0 while nothing runs that would tell."""
    num = told.num_submitted
    if not num:
        return 0.0
    cached = sum(engine.num_kv_tokens for engine in told.engines)
    return max(0.0, cached - float(told.length_of[told.place_of >= 0].sum())) / num


def started(running: Floats, waiting: Floats, num_slots: int) -> Floats:
    """When each that waits starts: list scheduling (Graham 1969) over `num_slots`, the first of the queue on the slot
    that is free first. `running` ends, sorted, hold slots; those beyond the slots' number are taken to share them."""
    free = np.zeros(max(0, num_slots - running.size))
    slots = np.concatenate((free, running))[:num_slots]
    width = max(1, -(-waiting.size // BLOCKS))
    heap = slots[width // 2 :: width].tolist() or [float(slots.mean())]
    heapq.heapify(heap)
    starts = np.empty(waiting.size)
    for at in range(0, waiting.size, width):
        block = waiting[at : at + width]
        start = heap[0]
        starts[at : at + width] = start
        # Its middle one stands for the block: a mean would end later than the first of them, and earlier than the last.
        heapq.heapreplace(heap, start + float(block[block.size // 2]))
    return starts


def _load(starts: Floats, ends: Floats, base: Floats, num_slots: int) -> Load:
    """What runs holds base + u tokens each."""
    queue_until = float(starts.max(initial=0.0))
    if not ends.size:
        none = np.zeros(1)
        return Load(1.0, none, none, none, none, num_slots, queue_until)
    step = float(ends.max()) / GRID
    middles = (np.arange(GRID) + 0.5) * step
    begins, finishes = _intervals(starts, step), _intervals(ends, step)
    num_ended = _until(finishes)
    running = _until(begins) - num_ended
    kv_tokens = _until(begins, base) - _until(finishes, base) + running * middles
    to_come = _until(begins, ends) - _until(finishes, ends) - running * middles
    return Load(step, running, kv_tokens, to_come / np.maximum(running, 1.0), num_ended, num_slots, queue_until)


def _intervals(at: Floats, step: float) -> Ints:
    """The first interval whose middle is not before each."""
    return np.minimum((at / step + 0.5).astype(np.int64), GRID)


def _until(place: Ints, weights: Floats | None = None) -> Floats:
    """At the middle of each interval: the weights of what came before it, or how many those are."""
    summed: Floats = np.cumsum(np.bincount(place, weights=weights, minlength=GRID + 1))[:-1].astype(np.float64)
    return summed


def _lots(
    situation: Situation, starts: Floats, ends: Floats, final: Floats, context: float
) -> tuple[Lots, tuple[int, ...]]:
    told = situation.generation
    size, sizes = told.group_size, left_sizes(situation)
    by_group = ends.reshape(-1, size)
    last = by_group.argmax(axis=1)
    group_ends = by_group[np.arange(told.num_groups), last]
    group_starts = starts.reshape(-1, size)[np.arange(told.num_groups), last]
    group_tokens = final.reshape(-1, size).sum(axis=1) + size * context
    minibatch = _minibatch_of(situation)
    order, is_ready = _in_order(situation, group_starts, group_ends, minibatch)
    width = max(1, -(-order.size // LOTS))
    is_open = told.unfinished_by_group > 0
    kinds = (group_starts[order] > 0, is_open[order], is_ready[order], minibatch[order])
    first = np.flatnonzero(_is_first(kinds, width))
    if not first.size:
        none, no_bool = np.zeros(0), np.zeros(0, dtype=np.bool_)
        return Lots(none, none, none, no_bool, no_bool, np.zeros(0, dtype=np.int64)), (0,) * len(sizes)
    end = np.maximum.reduceat(group_ends[order], first)
    start = np.minimum.reduceat(group_starts[order], first)
    lots = Lots(
        starts=np.where(start > 0, start, -1.0),
        steps=end - start,
        tokens=np.add.reduceat(group_tokens[order], first),
        is_ended=end <= 0,
        is_handed_on=is_ready[order][first],
        minibatch=minibatch[order][first],
    )
    return lots, tuple(np.searchsorted(first, np.cumsum(sizes)).tolist())


def minibatch_sizes(num_groups: int, num_minibatches: int) -> tuple[int, ...]:
    """In groups; the first have one more where they do not divide."""
    each, more = divmod(num_groups, num_minibatches)
    return tuple(each + (nth < more) for nth in range(num_minibatches))


def left_sizes(situation: Situation) -> tuple[int, ...]:
    """Groups not taken yet of the open minibatch, where one is open, and of those to come. A closed one has none."""
    training, told = situation.trainer.training, situation.generation
    sizes = minibatch_sizes(told.num_groups, situation.spec.num_minibatches)
    done = training.num_minibatches_done
    if training.is_at_boundary or done >= len(sizes):
        return sizes[done:]
    open_left = sum(sizes[: done + 1]) - training.num_taken
    return (max(0, open_left), *sizes[done + 1 :])


def _in_order(situation: Situation, starts: Floats, ends: Floats, minibatch: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """The groups that are not taken: handed on, complete, running as they end, waiting as they start; and by group,
    whether it is handed on."""
    training, ready = situation.trainer.training, np.array(situation.inference.inferring.ready, dtype=np.int64)
    is_open = situation.generation.unfinished_by_group > 0
    key = np.where(starts > 0, 1.0, np.where(is_open, 0.0, -1.0))
    place = np.where(starts > 0, starts, ends)
    key[ready], place[ready] = -2.0, np.arange(ready.size)
    is_ready, is_taken = np.zeros(ends.size, dtype=np.bool_), np.zeros(ends.size, dtype=np.bool_)
    is_ready[ready], is_taken[ready[: training.num_taken]] = True, True
    order = np.lexsort((place, minibatch, key))
    return order[~is_taken[order]], is_ready


def _minibatch_of(situation: Situation) -> Ints:
    """By group, the minibatch that takes it, counted from the first that is left. With `arrival` that depends on the
    plan: 0."""
    num_groups, spec = situation.generation.num_groups, situation.spec
    if spec.minibatch_order is MinibatchOrder.ARRIVAL:
        return np.zeros(num_groups, dtype=np.int64)
    sizes = minibatch_sizes(num_groups, spec.num_minibatches)
    own: Ints = np.repeat(np.arange(len(sizes)), sizes) - situation.trainer.training.num_minibatches_done
    return np.maximum(own, 0)


def _is_first(kinds: tuple[NDArray[Any], ...], width: int) -> NDArray[np.bool_]:
    """Whether each group of an order begins a lot: each is of one kind, and `width` groups at most."""
    here = np.arange(kinds[0].size)
    changes = np.ones(here.size, dtype=np.bool_)
    for kind in kinds:
        changes[1:] &= kind[1:] == kind[:-1]
    changes = ~changes
    changes[:1] = True
    begin = np.maximum.accumulate(np.where(changes, here, 0))
    is_first: NDArray[np.bool_] = (here - begin) % width == 0
    return is_first
