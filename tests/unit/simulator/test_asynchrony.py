"""Trainings whose rollout runs ahead of the trainer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from simulator.asynchrony.course import Asynchrony, OnNewWeights, long_workload
from simulator.asynchrony.world import AsyncWorld
from simulator.happenings import What
from simulator.lengths import LengthSection, draw_lengths
from simulator.workload import Workload
from simulator.world import Placement, World
from tests.unit.simulator.small import CLUSTER, COSTS, FREE_MOVES
from tidegate.types import Layout

LENGTHS = LengthSection(median_tokens=60, min_tokens=4, max_tokens=400)
NUM_ITERATIONS = 5


def one(seed: int) -> Workload:
    lengths = draw_lengths(LENGTHS, num_prompts=6, group_size=4, rng=np.random.default_rng(seed))
    return Workload(lengths=lengths, n_minibatches=2, prompt_tokens=10)


def world(rules: Asynchrony, *, free_moves: bool = False, num_iterations: int = NUM_ITERATIONS) -> AsyncWorld:
    works = [one(seed) for seed in range(num_iterations)]
    costs, placement = (FREE_MOVES if free_moves else COSTS), placed()
    return AsyncWorld(long_workload(works[0], [each.lengths for each in works]), costs, placement, rules)


def placed() -> Placement:
    return Placement(CLUSTER, CLUSTER[4:], CLUSTER[2:4], CLUSTER[:2], Layout(dp=2))


def ended(over: World) -> World:
    for _ in over.happenings():
        pass
    return over


@pytest.mark.parametrize("free_moves", [False, True])
def test_strict_iterations_take_as_long_as_one_by_one(free_moves: bool) -> None:
    over = world(Asynchrony(staleness=0), free_moves=free_moves)
    ended(over)
    costs = FREE_MOVES if free_moves else COSTS
    alone = [ended(World(one(seed), costs, placed())).now_s for seed in range(NUM_ITERATIONS)]
    assert [end - begin for begin, end in pairwise([0.0, *over.version_at_s])] == pytest.approx(alone)
    assert over.course.staleness().keys() == {0}


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("on_new_weights", OnNewWeights)
def test_no_token_is_staler_than_the_bound(staleness: int, on_new_weights: OnNewWeights) -> None:
    over = world(Asynchrony(staleness=staleness, on_new_weights=on_new_weights))
    ended(over)
    found = over.course.staleness()
    assert min(found) >= 0
    assert max(found) <= staleness
    assert sum(found.values()) == over.workload.lengths.num_tokens


@pytest.mark.parametrize("on_new_weights", OnNewWeights)
def test_every_sample_is_trained_once_in_its_own_iteration(on_new_weights: OnNewWeights) -> None:
    over = world(Asynchrony(staleness=2, on_new_weights=on_new_weights))
    ended(over)
    assert sorted(over.trainer.trained) == list(range(6 * NUM_ITERATIONS))
    iterations = [over.course.workload.iteration_of(group) for group in over.trainer.trained]
    assert iterations == sorted(iterations)
    assert len(over.version_at_s) == NUM_ITERATIONS


def test_a_rollout_that_runs_ahead_trains_faster_and_staler() -> None:
    strict, ahead = world(Asynchrony(staleness=0)), world(Asynchrony(staleness=1))
    assert ended(ahead).now_s < ended(strict).now_s
    assert 1 in ahead.course.staleness()


def test_sequences_that_go_on_under_new_weights_have_tokens_of_several_versions() -> None:
    kept = world(Asynchrony(staleness=2, on_new_weights=OnNewWeights.KEEPS_CACHE), free_moves=True)
    computed = world(Asynchrony(staleness=2, on_new_weights=OnNewWeights.COMPUTES_CACHE), free_moves=True)
    for over in (kept, computed):
        ended(over)
        assert any(len(marks) > 1 for marks in over.course.marks.values())
    assert generated_at_s(kept) < generated_at_s(computed)


def generated_at_s(over: World) -> float:
    return max(each.at_s for each in over.history if each.what is What.SEQUENCE_FINISHED)


def test_a_sequence_that_ends_under_old_weights_has_one_version() -> None:
    over = world(Asynchrony(staleness=2))
    ended(over)
    assert all(len(marks) == 1 for marks in over.course.marks.values())


def test_the_iterations_end_one_after_the_other() -> None:
    over = world(Asynchrony(staleness=3))
    numbers = [each.number for each in over.happenings() if each.what is What.MINIBATCH_FINISHED]
    assert numbers == list(range(2 * NUM_ITERATIONS))
    assert all(before < after for before, after in pairwise(over.version_at_s))
