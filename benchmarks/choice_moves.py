"""A policy's choice -> the moves of a simulated iteration, each as soon as it is possible.

Order:
1. Engines outside the assignment are released.
2. The inference releases its GPUs outside the assignment.
3. The trainer gets its target for the next boundary.
4. The inference gets its other GPUs.
5. Engines start on free GPUs.
A move to a GPU that is not available yet is tried again at the next happening. Lost GPUs are left out: no engine starts
on one, and the trainer gets as many whole data-parallel copies as its other GPUs make.

A GPU is released before it is acquired, no move is requested twice, and no move is refused.
"""

from __future__ import annotations

import math

from services.scheduler.policy.situation import Choice
from services.scheduler.state.layouts import most_copies
from services.scheduler.state.remembered import Assignment
from services.scheduler.state.values import Placed
from simulator.gpus import Holder
from simulator.happenings import Happening, What
from simulator.world import World
from tidegate.order_of_responses import responses_in
from tidegate.types import GpuId, Layout


class ChoiceMoves:
    """Carries out the choices for one world."""

    def __init__(self, world: World, assignment: Assignment, group_size: int) -> None:
        self._world, self._assignment, self._group_size = world, assignment, group_size
        self._group_order: tuple[int, ...] = ()
        self._trains = True
        self._cold: set[GpuId] = set()
        """The GPUs of dead engines: the next engine there starts cold."""
        self._leaving: set[int] = set()

    def accept(self, choice: Choice) -> None:
        """Carry out this choice from now on."""
        self._assignment = choice.assignment
        if choice.group_order and choice.group_order != self._group_order:
            self._group_order = choice.group_order
            size = self._group_size
            self._world.order_queue(group * size + draw for group, draw in responses_in(choice.group_order, size))
        self._trains = choice.trains
        self.carry_on()

    def notice(self, happening: Happening) -> None:
        """Remember a dead engine: one that left without a release."""
        if happening.what is What.ENGINE_LEFT:
            if happening.number not in self._leaving:
                self._cold.update(happening.gpus)
            self._leaving.discard(happening.number)

    def carry_on(self) -> None:
        """Make every move of the assignment that is possible now."""
        # Hold training meanwhile: a freed GPU wakes the trainer, which must get its target before its next minibatch.
        self._world.hold_training(math.inf)
        self._move(self._assignment)
        if self._trains:
            self._world.hold_training(self._world.now_s)

    def _move(self, assignment: Assignment) -> None:
        world = self._world
        engines = {gpus for gpus in assignment.engines if not self._has_lost(gpus)}
        self._release({name for name, engine in world.rollout.engines.items() if engine.gpus not in engines})
        inference = tuple(gpu for gpu in assignment.inference if not self._has_lost((gpu,)))
        self._resize_inference(tuple(gpu for gpu in world.inference.target_gpus if gpu in inference))
        self._resize_trainer(self._without_lost(assignment.trainer))
        self._resize_inference(tuple(gpu for gpu in inference if world.may_get(gpu, Holder.INFERENCE)))
        self._acquire(engines)

    def _has_lost(self, gpus: tuple[GpuId, ...]) -> bool:
        return any(self._world.gpus.holder(gpu) is Holder.LOST for gpu in gpus)

    def _without_lost(self, placed: Placed | None) -> Placed | None:
        if placed is None or not self._has_lost(placed.gpus):
            return placed
        return most_copies(placed.layout, tuple(gpu for gpu in placed.gpus if not self._has_lost((gpu,))))

    def _release(self, names: set[int]) -> None:
        if names:
            self._leaving |= names
            self._world.release_engines(sorted(names))

    def _resize_inference(self, gpus: tuple[GpuId, ...]) -> None:
        if set(gpus) != set(self._world.inference.target_gpus):
            self._world.resize_inference(gpus)

    def _resize_trainer(self, placed: Placed | None) -> None:
        target: tuple[tuple[GpuId, ...], Layout | None] = (placed.gpus, placed.layout) if placed else ((), None)
        trainer = self._world.trainer
        if target != trainer.target and all(self._world.may_get(gpu, Holder.ACTOR) for gpu in target[0]):
            self._world.resize_trainer(*target)

    def _acquire(self, engines: set[tuple[GpuId, ...]]) -> None:
        world, assigned = self._world, self._assignment.engines
        free = set(world.gpus.held_by(Holder.FREE)) - world.promised()
        starting = [gpus for gpus in assigned if gpus in engines and free.issuperset(gpus)]
        for is_cold in (False, True):
            gpus = tuple(gpu for each in starting if is_cold is not self._cold.isdisjoint(each) for gpu in each)
            world.acquire_engines(gpus, cold=is_cold)
            self._cold.difference_update(gpus)
