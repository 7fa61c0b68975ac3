"""The bound against every schedule of small iterations with free moves and known lengths: none ends before it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations, product

import pytest

from simulator.bound import clairvoyant_bound
from simulator.gpus import Holder
from simulator.happenings import What
from simulator.lengths import Turns
from simulator.workload import Workload
from simulator.world import Placement, World
from tests.unit.simulator.small import CLUSTER, FREE_MOVES, workload
from tidegate.types import Layout

GPUS = CLUSTER[:3]
CASES: dict[str, list[tuple[Turns, Turns]]] = {
    "groups alike": [((40,), (40,)), ((40,), (40,)), ((40,), (40,))],
    "one long response": [((400,), (10,)), ((20,), (30,)), ((30,), (20,))],
    "much to train": [((600,), (600,)), ((500,), (500,)), ((600,), (500,))],
    "two turns": [((40, 40), (10,)), ((20,), (30, 10)), ((30,), (20,))],
}


@dataclass(frozen=True)
class Schedule:
    """One schedule of an iteration.

    `num_staying` engines stay until the rollout ends. The others leave after `groups_before` groups. Groups begin in
    `order`.
    """

    num_staying: int
    groups_before: int
    order: tuple[int, ...]
    inference_first: bool


def every_schedule(work: Workload) -> list[Schedule]:
    orders = list(permutations(range(work.num_groups)))
    return [Schedule(*each) for each in product(range(1, 4), range(work.num_groups), orders, (False, True))]


def ends(work: Workload, schedule: Schedule) -> float:
    """The end of the iteration if free GPUs go to the stage with work: first to the trainer at its boundaries, or first
    to the inference."""
    world = World(work, FREE_MOVES, Placement(GPUS, GPUS))
    world.order_queue(2 * group + member for group in schedule.order for member in range(2))
    done = 0
    for happening in world.happenings():
        done += happening.what is What.GROUP_FINISHED
        give_up(world, schedule, done)
        hand_out(world, work, schedule)
    return world.now_s


def give_up(world: World, schedule: Schedule, done: int) -> None:
    engines = sorted(world.rollout.engines)
    if not world.rollout.num_unfinished:
        world.release_engines(engines)
    elif done >= schedule.groups_before and len(engines) > schedule.num_staying:
        world.release_engines(engines[schedule.num_staying :])


def hand_out(world: World, work: Workload, schedule: Schedule) -> None:
    inference, trainer = world.inference, world.trainer
    if inference.target_gpus and not inference.backlog and not inference.is_busy:
        world.resize_inference(())
    free = world.gpus.held_by(Holder.FREE)
    is_idle = trainer.is_at_boundary and not trainer.is_resizing and not trainer.waiting_resize and not trainer.is_done
    can_open = is_idle and len(trainer.ready) >= (1 if work.streams else work.minibatch_sizes[trainer.minibatch])
    needs_inference = bool(inference.backlog) and not inference.target_gpus
    if needs_inference and free and (schedule.inference_first or not can_open):
        world.resize_inference(free)
    elif can_open and free:
        gpus = (*trainer.gpus, *free)
        world.resize_trainer(gpus, Layout(dp=len(gpus)))
    elif needs_inference and is_idle and trainer.gpus and not can_open:
        world.resize_trainer((), None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("streams", [False, True])
def test_no_schedule_ends_before_the_bound_and_the_best_schedule_is_near_it(name: str, streams: bool) -> None:
    work = workload(CASES[name], streams=streams)
    bound = clairvoyant_bound(work, FREE_MOVES, num_gpus=len(GPUS))
    best = min(ends(work, schedule) for schedule in every_schedule(work))
    assert bound.bound_s <= best
    assert best <= 2.5 * bound.bound_s


def test_the_bound_of_single_responses_is_exactly_their_longest_path() -> None:
    work = workload([((50,),), ((50,),)])
    bound = clairvoyant_bound(work, FREE_MOVES, num_gpus=1)
    decode_s = FREE_MOVES.engine.decode_s(running=1, kv_tokens=10, steps=50)
    rest_s = 60 / FREE_MOVES.inference.rate_tokens_per_s + 60 / FREE_MOVES.trainer.rate(1) + 0.5
    assert bound.longest_path_s == pytest.approx(decode_s + rest_s)


def test_a_bound_needs_the_gpus_of_one_engine() -> None:
    work = workload([((5,),)])
    with pytest.raises(ValueError, match="0 GPUs hold no engine of 1"):
        clairvoyant_bound(work, FREE_MOVES, num_gpus=0)
