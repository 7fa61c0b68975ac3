"""Brings the GPUs of an asynchronous training to another split.

Order:
1. The rollout releases its engines with the fewest sequences; the trainer and the inference get their new GPUs, some of
   which are still leaving another component.
2. The trainer changes at its next boundary, the inference between two pieces of work.
3. What becomes free and is promised to no component makes new engines.

Invariant: a split is reached with the fewest moves of GPUs: a component that grows keeps all that it has.
[test_async_training: keeps_all_that_it_has]
"""

from __future__ import annotations

from services.scheduler.policy.balance import Sizes, Split
from services.scheduler.state.layouts import with_dp
from simulator.asynchrony.world import AsyncWorld
from simulator.gpus import Holder
from tidegate.types import GpuId, Layout


class Mover:
    """`home`: the trainer's layout, of which copies are made."""

    def __init__(self, world: AsyncWorld, sizes: Sizes, home: Layout) -> None:
        self._world, self._sizes, self._home = world, sizes, home

    def go_to(self, split: Split) -> None:
        """MoveRefused: a component cannot have its GPUs."""
        world, sizes = self._world, self._sizes
        trainer, _ = world.trainer.target
        inference = world.inference.target_gpus
        kept = trainer[: split.copies * sizes.copy]
        scoring = inference[: split.inference]
        free = [*world.gpus.held_by(Holder.FREE), *trainer[len(kept) :], *inference[len(scoring) :]]
        free += self._release(split.engines)
        missing = split.copies * sizes.copy - len(kept)
        kept, free = (*kept, *free[:missing]), free[missing:]
        scoring = (*scoring, *free[: split.inference - len(scoring)])
        # The one that shrinks first: no GPU is promised to two.
        if len(kept) <= len(trainer):
            self._set_trainer(kept)
            world.resize_inference(scoring)
        else:
            world.resize_inference(scoring)
            self._set_trainer(kept)
        self.start_engines()

    def start_engines(self) -> None:
        """Engines on all GPUs that are free and that no component shall have."""
        world, size = self._world, self._sizes.engine
        free = [gpu for gpu in world.gpus.held_by(Holder.FREE) if gpu not in world.promised()]
        if whole := len(free) // size * size:
            world.acquire_engines(free[:whole])

    def _release(self, keep: int) -> list[GpuId]:
        """The GPUs of the engines beyond `keep`: of those that run least."""
        engines = self._world.rollout.engines
        fewest_first = sorted(engines.values(), key=lambda engine: (engine.running, engine.name))
        leaving = fewest_first[: max(0, len(engines) - keep)]
        gpus = [gpu for engine in leaving for gpu in engine.gpus]
        self._world.release_engines(engine.name for engine in leaving)
        return gpus

    def _set_trainer(self, gpus: tuple[GpuId, ...]) -> None:
        if gpus != self._world.trainer.target[0]:
            layout = with_dp(self._home, len(gpus) // self._sizes.copy)
            self._world.resize_trainer(gpus, layout)
