"""Runs an iteration by a fixed schedule on the world, without a policy, situations or forecasts.

A schedule has
- the time of the trainer's first GPUs, and of the inference's if these come before;
- the trainer's GPUs for each minibatch, and the inference's GPUs for each part of a minibatch;
- the minibatches that wait until a number of their groups is ready, and whether the rollout gets the trainer's GPUs
  meanwhile;
- the order in which sequences begin, and begin again.
The engines have the remaining GPUs.

Order at each happening:
1. If the last group of the open minibatch is taken and only the time of a release is left to its end, the next
   minibatch becomes the target. The trainer gets its GPUs for it.
2. Inference and engines follow.
At the end of the rollout its GPUs go to the inference, and at the end of the inference its GPUs go to the trainer,
whose start is not later. So a start after the rollout, with every GPU for the trainer, makes phases.

A component with work has GPUs. A schedule that needs more GPUs than the cluster has gets all there are. A trainer with
an open minibatch keeps its GPUs. Moves cost the same as under a policy. The same schedule gives the same run.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from benchmarks.choice_moves import ChoiceMoves
from services.scheduler.policy.actor_layouts import fewest_gpus
from services.scheduler.policy.situation import Choice, Split
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.state.layouts import engine_size, most_copies, replica_size, replicas
from services.scheduler.state.remembered import Assignment
from services.scheduler.state.units import but_for
from services.scheduler.state.values import Placed
from simulator.happenings import Happening, What
from simulator.iteration import PROGRESS, SimulatedIteration
from simulator.world import World
from tidegate.types import GpuId, MinibatchOrder, Role

LEAD_S = TideRules().lead_s
"""The time by which a release comes before the end of a minibatch, as in `tide`."""
PARTS = 2
"""The parts of a minibatch in a search. The inference may have another number of GPUs in each."""
STAGES_WAKE, START_WAKE, INFER_WAKE = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Schedule:
    start_s: float
    """The time of the trainer's first GPUs."""
    trainer: tuple[int, ...]
    """GPUs of the trainer for each minibatch."""
    inference: tuple[int, ...]
    """GPUs of the inference for each part of a minibatch. All minibatches have the same number of parts. A part ends
    when its share of the minibatch's groups is taken."""
    order: tuple[int, ...] = ()
    """All sequences in the order in which they begin."""
    waits: tuple[float, ...] = ()
    """The share of its groups for which each minibatch waits. None begins without a group."""
    lends: tuple[bool, ...] = ()
    """Whether the trainer has no GPUs while a minibatch waits."""
    soonest_back: bool = True
    """The order in which returned sequences begin again. True: the groups that the next minibatch needs, soonest end
    first, then the others, the longest first. False: `order`."""
    infer_s: float | None = None
    """The time of the inference's first GPUs, ahead of the trainer's. None: with them."""


def in_parts(inference: tuple[int, ...]) -> tuple[int, ...]:
    """GPUs by part, from GPUs by minibatch."""
    return tuple(each for each in inference for _ in range(PARTS))


def run_schedule(simulated: SimulatedIteration, schedule: Schedule) -> World:
    """The world after the iteration."""
    return _ScheduleRun(simulated, schedule).run()


class _ScheduleRun:
    def __init__(self, simulated: SimulatedIteration, schedule: Schedule) -> None:
        self._schedule, self._spec = schedule, simulated.spec
        self._cluster = simulated.scenario.cluster.gpus()
        self._place_of = {gpu: place for place, gpu in enumerate(self._cluster)}
        self._engine = engine_size(self._spec)
        self._home = self._spec.placement[Role.ACTOR].layout
        self._unit, self._fewest = replica_size(self._home), fewest_gpus(self._spec)
        self._copy = replica_size(self._spec.placement[Role.INFERENCE].layout)
        self._sizes = simulated.workload.minibatch_sizes
        self._before = (0, *accumulate(self._sizes))
        self._num_groups = simulated.workload.num_groups
        self._lengths = np.array([sum(turns) for row in simulated.workload.lengths.turns for turns in row])
        self._release_s = simulated.costs.switch.release_s + LEAD_S
        self._is_begun = schedule.start_s <= 0
        self._infers = self._is_begun or (schedule.infer_s is not None and schedule.infer_s <= 0)
        self._is_over = False
        num_trainer = schedule.trainer[0] if self._is_begun else 0
        self._split = self._legal_split(Split(0, num_trainer, schedule.inference[0]))
        self._trains = True
        self._assignment = self._assigned(Assignment((), None, ()))
        self._world = simulated.world(self._assignment)
        self._moves = ChoiceMoves(self._world, self._assignment, simulated.workload.group_size)

    def run(self) -> World:
        world = self._world
        if self._schedule.order:
            world.order_queue(self._schedule.order)
        world.wake_at(self._schedule.start_s, START_WAKE)
        if self._schedule.infer_s is not None:
            world.wake_at(self._schedule.infer_s, INFER_WAKE)
        for happening in world.happenings():
            self._moves.notice(happening)
            self._note(happening)
            if world.all_reported and happening.what is not What.ITERATION_FINISHED:
                self._follow(happening)
        return world

    def _note(self, happening: Happening) -> None:
        match happening.what:
            case What.ROLLOUT_FINISHED:
                self._is_over = self._infers = True
            case What.MINIBATCH_CLOSED:
                closes_at_s = self._world.trainer.closes_at_s
                assert closes_at_s is not None, "the minibatch is closed"
                self._world.wake_at(closes_at_s - self._release_s, STAGES_WAKE)
            case What.WOKE if happening.number == START_WAKE:
                self._is_begun = self._infers = True
            case What.WOKE if happening.number == INFER_WAKE:
                self._infers = True

    def _follow(self, happening: Happening) -> None:
        split, trains = self._target()
        if (split, trains) == (self._split, self._trains):
            if happening.what not in PROGRESS:
                self._moves.carry_on()
            return
        fewer = split.num_engines < self._split.num_engines and not self._is_over
        self._split, self._trains = split, trains
        self._assignment = self._assigned(self._assignment)
        if fewer and self._schedule.soonest_back:
            self._world.order_queue(self._order_back())
        self._moves.accept(Choice(self._assignment, trains, ""))

    def _target(self) -> tuple[Split, bool]:
        """The split by the schedule, and whether the trainer may begin its next minibatch."""
        world, schedule = self._world, self._schedule
        trainer = world.trainer
        ready = len(trainer.trained) + len(trainer.taken) + len(trainer.ready)
        is_inferred = ready == self._num_groups
        self._is_begun = self._is_begun or is_inferred
        if not self._is_begun:
            return self._legal_split(Split(0, 0, schedule.inference[0])), True
        is_open = not trainer.is_at_boundary
        coming = trainer.minibatch + is_open
        is_near = trainer.closes_at_s is not None and world.now_s >= trainer.closes_at_s - self._release_s - 1e-6
        aimed = min(trainer.minibatch if is_open and not is_near else coming, len(self._sizes) - 1)
        parts = len(schedule.inference) // len(schedule.trainer)
        part = len(trainer.taken) * parts // self._sizes[aimed] if aimed != coming else 0
        num_inference = schedule.inference[aimed * parts + min(part, parts - 1)]
        if coming >= len(self._sizes) or (is_open and not is_near):
            num_trainer, trains = self._split.num_trainer_gpus, True
        elif not is_inferred and ready - self._before[coming] < self._wait(coming):
            is_lent = bool(schedule.lends) and schedule.lends[coming]
            num_trainer, trains = 0 if is_lent else self._split.num_trainer_gpus, False
        else:
            num_trainer, trains = len(self._cluster) if is_inferred else schedule.trainer[coming], True
        return self._legal_split(Split(0, num_trainer, num_inference), is_inferred=is_inferred), trains

    def _wait(self, minibatch: int) -> float:
        """The number of groups for which a minibatch waits."""
        share = self._schedule.waits[minibatch] if self._schedule.waits else 0.0
        return share * self._sizes[minibatch]

    def _legal_split(self, split: Split, *, is_inferred: bool = False) -> Split:
        """The nearest legal split: first the trainer, then the inference. The engines have the remaining GPUs."""
        num = len(self._cluster)
        least = 0 if self._is_over else self._engine
        if not self._infers:
            return Split(num // self._engine, 0, 0)
        least_inference = 0 if is_inferred else self._copy
        trainer = max(0, min(split.num_trainer_gpus, num - least - least_inference)) // self._unit * self._unit
        trainer = max(trainer, self._fewest) if split.num_trainer_gpus else 0
        inference = 0 if is_inferred else max(self._copy, min(split.num_inference_gpus, num - least - trainer))
        engines = 0 if self._is_over else (num - trainer - inference) // self._engine
        rest = (num - trainer - engines * self._engine) // self._copy * self._copy
        return Split(engines, trainer, 0 if is_inferred else rest)

    def _assigned(self, before: Assignment) -> Assignment:
        """An assignment for the split, in which components keep their GPUs where possible.

        The cluster's first engines leave, since they are next to the trainer. A choice of the engines by their caches
        ended no sooner, and it needs a new plan for every reshard of a search.
        """
        split = self._split
        in_place = sorted(before.engines, key=lambda gpus: self._place_of[gpus[0]])
        engines = in_place[max(0, len(in_place) - split.num_engines) :]
        trainer = list(before.trainer.gpus[: split.num_trainer_gpus]) if before.trainer else []
        taken = {*trainer, *(gpu for gpus in engines for gpu in gpus)}
        stays = [gpu for gpu in before.inference if gpu not in taken][: split.num_inference_gpus]
        pool = but_for(self._cluster, {*taken, *stays})
        more = pool[: split.num_trainer_gpus - len(trainer)]
        pool = pool[len(more) :]
        new = replicas(tuple(pool), self._engine)[: split.num_engines - len(engines)]
        pool = but_for(pool, {gpu for gpus in new for gpu in gpus})
        inference = (*stays, *pool[: split.num_inference_gpus - len(stays)])
        return Assignment((*engines, *new), self._placed((*trainer, *more)), inference)

    def _placed(self, gpus: tuple[GpuId, ...]) -> Placed | None:
        return most_copies(self._home, gpus)

    def _order_back(self) -> list[int]:
        """The order in which returned sequences begin again.

        1. Begun groups that the next minibatch needs, soonest end first.
        2. Other begun groups, the longest first. Those of the last minibatch are all here.
        3. Groups that have not begun, in the schedule's order.

        Where minibatches have fixed groups, 1 and 2 are: begun groups by minibatch, of each the longest first.
        """
        rollout, trainer = self._world.rollout, self._world.trainer
        rollout.advance()
        made, _ = rollout.columns.snapshot({name: engine.steps for name, engine in rollout.engines.items()})
        size = self._spec.group_size
        has_begun = made.reshape(-1, size).max(axis=1)
        left = (self._lengths - made).reshape(-1, size).max(axis=1)
        coming = trainer.minibatch + (not trainer.is_at_boundary)
        is_last = coming >= len(self._sizes) - 1
        needed = 0 if is_last else max(0, self._before[coming + 1] - int((left == 0).sum()))
        begun = [group for group in np.argsort(left, kind="stable").tolist() if left[group] and has_begun[group]]
        groups = [*begun[:needed], *begun[needed:][::-1]]
        if self._spec.minibatch_order is MinibatchOrder.FIXED:
            groups = sorted(begun, key=lambda group: (bisect.bisect(self._before, group), -left[group]))
        first = [group * size + at for group in groups for at in range(size)]
        seen = set(first)
        order = self._schedule.order or range(len(self._lengths))
        return [*first, *(number for number in order if number not in seen)]
