"""What a policy chose -> the moves of a simulated iteration, each as soon as it can be made.

Order: engines that are not wanted are released, inference gives up what it is not to have, the trainer is asked to
change at its next boundary, inference gets what it is to have, engines start on GPUs that are free. A GPU that its next
owner cannot have yet is asked for again at the next happening.
What is lost is left out: an engine with such a GPU is not made, the trainer gets as many whole data-parallel copies as
its other GPUs make.
Invariants: a GPU is released before it is acquired; nothing is asked for twice; no move is ever refused.
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
from tidegate.types import GpuId, Layout


class Carrying:
    """Of one world."""

    def __init__(self, world: World, wanted: Assignment, group_size: int) -> None:
        self._world, self._wanted, self._group_size = world, wanted, group_size
        self._group_order: tuple[int, ...] = ()
        self._trains = True
        self._cold: set[GpuId] = set()
        """GPUs whose engine died: the next one there starts cold."""
        self._leaving: set[int] = set()

    def accept(self, choice: Choice) -> None:
        """From now on that is wanted."""
        self._wanted = choice.assignment
        if choice.group_order and choice.group_order != self._group_order:
            self._group_order = choice.group_order
            size = self._group_size
            self._world.order_queue(group * size + member for group in choice.group_order for member in range(size))
        self._trains = choice.trains
        self.carry_on()

    def notice(self, happening: Happening) -> None:
        """An engine that was not asked to leave has died."""
        if happening.what is What.ENGINE_LEFT:
            if happening.number not in self._leaving:
                self._cold.update(happening.gpus)
            self._leaving.discard(happening.number)

    def carry_on(self) -> None:
        """Every move of what is wanted that can be made now."""
        # A GPU that comes free in between wakes the trainer, which must not begin before it is asked to change.
        self._world.hold_training(math.inf)
        self._move(self._wanted)
        if self._trains:
            self._world.hold_training(self._world.now_s)

    def _move(self, wanted: Assignment) -> None:
        world = self._world
        engines = {gpus for gpus in wanted.engines if not self._has_lost(gpus)}
        self._release({name for name, engine in world.rollout.engines.items() if engine.gpus not in engines})
        inference = tuple(gpu for gpu in wanted.inference if not self._has_lost((gpu,)))
        self._resize_inference(tuple(gpu for gpu in world.inference.target_gpus if gpu in inference))
        self._resize_trainer(self._there(wanted.trainer))
        self._resize_inference(tuple(gpu for gpu in inference if world.may_get(gpu, Holder.INFERENCE)))
        self._acquire(engines)

    def _has_lost(self, gpus: tuple[GpuId, ...]) -> bool:
        return any(self._world.gpus.holder(gpu) is Holder.LOST for gpu in gpus)

    def _there(self, placed: Placed | None) -> Placed | None:
        """Without what is lost."""
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
        world, wanted = self._world, self._wanted.engines
        free = set(world.gpus.held_by(Holder.FREE)) - world.promised()
        coming = [gpus for gpus in wanted if gpus in engines and free.issuperset(gpus)]
        for is_cold in (False, True):
            gpus = tuple(gpu for each in coming if is_cold is not self._cold.isdisjoint(each) for gpu in each)
            world.acquire_engines(gpus, cold=is_cold)
            self._cold.difference_update(gpus)
