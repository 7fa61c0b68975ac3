"""The rest of an iteration, against the same counted one sequence at a time."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policy.situation import minibatch_sizes
from services.scheduler.policy.tide.outlook import GRID, left_sizes, outlook, started
from services.scheduler.state.observed import ENDED, Floats
from services.scheduler.state.remembered import as_configured
from tests.unit.scheduler.situations import ending, generation, job, seen
from tidegate.types import MinibatchOrder

SPEC = job(actor=2, rollout=4, inference=2, prompts=24, group_size=2, minibatches=3)


def test_a_queue_starts_as_slots_come_free() -> None:
    rng = np.random.default_rng(3)
    running, waiting = np.sort(rng.integers(1, 900, 6)).astype(np.float64), rng.integers(1, 900, 40).astype(np.float64)
    assert started(running, waiting, 8) == pytest.approx(one_by_one(running, waiting, 8))


def test_a_long_queue_is_started_in_blocks_that_come_close() -> None:
    rng = np.random.default_rng(4)
    waiting = 7000 * np.exp(0.5 * rng.standard_normal(4000))
    want = np.array(one_by_one(np.zeros(0), waiting, 1000))
    error = started(np.zeros(0), waiting, 1000) - want
    assert np.abs(error).mean() <= 0.02 * want.max()


def one_by_one(running: Floats, waiting: Floats, num_slots: int) -> list[float]:
    heap = [0.0] * (num_slots - len(running)) + running.tolist()
    heapq.heapify(heap)
    starts = []
    for steps in waiting:
        starts.append(heap[0])
        heapq.heapreplace(heap, starts[-1] + steps)
    return starts


def test_what_runs_and_what_it_caches_is_counted_at_every_step() -> None:
    lengths, places = ending(SPEC, num_engines=4, num_unfinished=30, num_unsubmitted=10, length=100)
    picture = generation(SPEC, as_configured(SPEC).engines, lengths=lengths, places=places, kv_use=0.0)
    situation = seen(SPEC, as_configured(SPEC), picture=picture)
    final = np.array(lengths, dtype=np.float64) + np.where(picture.is_unfinished, np.arange(48) * 3.0 + 20, 0.0)
    load = outlook(situation, final, num_slots=20).load
    running = [at for at in np.flatnonzero(picture.is_unfinished).tolist() if at not in picture.queue]
    left, queue = final - picture.length_of, list(picture.queue)
    starts = dict.fromkeys(running, 0.0)
    starts.update(zip(queue, one_by_one(np.sort(left[running]), left[queue], 20), strict=True))
    for interval in range(GRID):
        at = (interval + 0.5) * load.step
        runs = [each for each, start in starts.items() if start <= at < start + final[each] - lengths[each]]
        assert load.running[interval] == pytest.approx(len(runs), abs=2)
        want = sum(lengths[each] + at - starts[each] for each in runs)
        assert load.kv_tokens[interval] == pytest.approx(want, abs=2 * final.max())


def test_lots_hold_every_group_that_is_not_taken() -> None:
    situation = seen(SPEC, as_configured(SPEC), num_unfinished=20, num_taken=5)
    final = situation.generation.length_of.astype(np.float64) + np.where(situation.generation.is_unfinished, 50.0, 0.0)
    found = outlook(situation, final, num_slots=100)
    assert found.lots.tokens.sum() == pytest.approx(final.reshape(-1, 2).sum(axis=1)[5:].sum(), rel=0.2)
    assert found.until[-1] == found.lots.tokens.size
    assert found.lots.is_handed_on.sum() == 24 - 10 - 5


def test_in_a_fixed_order_a_group_waits_for_all_that_come_before_it() -> None:
    spec = replace(SPEC, minibatch_order=MinibatchOrder.FIXED)
    lengths, places = ending(spec, num_engines=4, num_unfinished=48, num_unsubmitted=0, length=100)
    picture = generation(spec, as_configured(spec).engines, lengths=lengths, places=places)
    left = np.repeat(np.arange(24) * 10.0 + 10, 2)
    left[:2] = 900.0
    lots = outlook(seen(spec, as_configured(spec), picture=picture), 100 + left, num_slots=100).lots
    tokens = (100 + left).reshape(-1, 2).sum(axis=1)
    waits = lots.minibatch == 0
    want = np.where(np.arange(8) == lots.steps[waits].argmax(), tokens[:8].sum(), 0.0)
    assert lots.due_tokens[waits] == pytest.approx(want)
    assert lots.due_tokens[~waits] == pytest.approx(lots.tokens[~waits])
    assert lots.due_tokens.sum() == pytest.approx(lots.tokens.sum())


def test_the_groups_of_a_lot_either_all_started_or_all_wait() -> None:
    spec = job(actor=2, rollout=4, inference=2, prompts=600, group_size=2, minibatches=3)
    situation = seen(spec, as_configured(spec), num_unfinished=1000, num_unsubmitted=900, length=500)
    picture = situation.generation
    rng = np.random.default_rng(5)
    final = picture.length_of + np.where(picture.is_unfinished, rng.integers(1, 2000, picture.length_of.size), 0.0)
    lots = outlook(situation, final.astype(np.float64), num_slots=100).lots
    # 450 groups wait. Those that have ended, or run, make lots of their own, at most 64 groups' worth each.
    tokens = final.reshape(-1, 2).sum(axis=1)
    assert lots.tokens[lots.starts >= 0].sum() == pytest.approx(tokens[-450:].sum())
    assert lots.tokens[lots.starts < 0].sum() == pytest.approx(tokens[:-450].sum())


def test_groups_that_inference_handed_on_come_first_and_then_complete_ones() -> None:
    situation = seen(SPEC, as_configured(SPEC), num_unfinished=20, ready=(9, 2, 5))
    final = situation.generation.length_of + np.where(situation.generation.is_unfinished, 50.0, 0.0)
    lots = outlook(situation, final.astype(np.float64), num_slots=100).lots
    rank = np.where(lots.is_handed_on, 0, np.where(lots.is_ended, 1, 2))
    assert rank.tolist() == sorted(rank.tolist())
    assert set(rank.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(("lengths", "want"), [((10, 10), 0.0), ((10, 30), math.log2(1.5))])
def test_unevenness_tells_how_much_longer_the_longest_response_is(lengths: tuple[int, int], want: float) -> None:
    """The longer of two responses has two to this power times the tokens of their mean."""
    picture = generation(SPEC, as_configured(SPEC).engines, lengths=lengths * 24, places=(ENDED,) * 48)
    final = np.array(lengths * 24, dtype=np.float64)
    found = outlook(seen(SPEC, as_configured(SPEC), picture=picture), final, num_slots=100)
    assert found.unevenness == pytest.approx(want)


def test_minibatches_that_do_not_divide_differ_by_one() -> None:
    assert minibatch_sizes(10, 4) == (3, 3, 2, 2)


def test_of_an_open_minibatch_only_what_is_not_taken_is_left() -> None:
    open_one = seen(SPEC, as_configured(SPEC), num_unfinished=8, num_done=1, num_taken=11, is_at_boundary=False)
    assert left_sizes(open_one) == (5, 8)
    between = seen(SPEC, as_configured(SPEC), num_unfinished=8, num_done=1, num_taken=8)
    assert left_sizes(between) == (8, 8)
