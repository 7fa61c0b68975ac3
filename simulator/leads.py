"""The leads of a simulated job's components: a command of the scheduler becomes a move of the world.

A lead begins a change as soon as it is asked to. Once the world shows it, the lead reports that its layout is in force
and that the GPUs that left are free. Before the iteration there is no world, and a change is done at once.

Invariants:
- A component has one change at a time.
- A lead reports a GPU as free only when the world has it so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from simulator.changes import Change
from simulator.gpus import Holder
from simulator.happenings import What
from simulator.world import World
from tidegate.types import GpuId, Grant, InstanceId, Layout, Role


class Moves(Protocol):
    """The moves of the world that make a component's change."""

    triggers: frozenset[What]
    """The happenings after which a change may have gone on."""

    def begin(self, world: World, change: Change) -> None: ...

    def is_there(self, world: World, change: Change) -> bool:
        """Whether the component works as the change has it."""
        ...

    def clear(self, world: World, gpu: GpuId) -> None:
        """Take the GPU from its present holder."""
        ...


@dataclass
class Lead:
    """`members` have passed their gates. `clearing` has the grants to let go of, whatever holds their GPUs."""

    role: Role
    instance: InstanceId
    moves: Moves
    members: tuple[Grant, ...] = ()
    layout: Layout | None = None
    change: Change | None = None
    clearing: set[Grant] = field(default_factory=set)

    def begin(self, change: Change, world: World | None) -> None:
        self.change = change
        if world is not None:
            self.moves.begin(world, change)

    def is_there(self, world: World | None) -> bool:
        """Whether the change's layout is in force."""
        assert self.change is not None, "without a change there is nothing to wait for"
        return world is None or self.moves.is_there(world, self.change)

    def grants_on(self, gpus: Iterable[GpuId]) -> tuple[Grant, ...]:
        """The grants on these GPUs among the members and among those that come."""
        named = set(gpus)
        coming = self.change.coming if self.change else ()
        return tuple(grant for grant in (*self.members, *coming) if grant.gpu in named)


def are_free(world: World | None, grants: Iterable[Grant]) -> bool:
    return world is None or all(world.gpus.holder(grant.gpu) is Holder.FREE for grant in grants)


@dataclass
class RolloutMoves:
    """Engines come and go at once. An engine starts cold on GPUs whose engine died."""

    triggers: frozenset[What] = frozenset({What.ENGINE_ACQUIRED, What.ENGINE_LEFT, What.GPUS_FREED})
    leaving_engines: set[int] = field(default_factory=set)
    cold: set[GpuId] = field(default_factory=set)

    def begin(self, world: World, change: Change) -> None:
        self._release(world, {grant.gpu for grant in change.leaving})
        coming = tuple(grant.gpu for grant in change.coming)
        size = world.costs.engine.gpus_per_engine
        engines = [coming[start : start + size] for start in range(0, len(coming), size)]
        for is_cold in (False, True):
            gpus = tuple(gpu for each in engines if is_cold is not self.cold.isdisjoint(each) for gpu in each)
            world.acquire_engines(gpus, cold=is_cold)
            self.cold.difference_update(gpus)

    def is_there(self, world: World, change: Change) -> bool:
        working = {gpu for engine in world.rollout.engines.values() for gpu in engine.gpus}
        return working.issuperset(grant.gpu for grant in change.coming)

    def clear(self, world: World, gpu: GpuId) -> None:
        self._release(world, {gpu})

    def _release(self, world: World, gpus: set[GpuId]) -> None:
        names = {name for name, engine in world.rollout.engines.items() if not gpus.isdisjoint(engine.gpus)}
        self.leaving_engines |= names
        world.release_engines(sorted(names))


@dataclass
class InferenceMoves:
    triggers: frozenset[What] = frozenset({What.INFERENCE_RESIZED, What.GPUS_FREED})

    def begin(self, world: World, change: Change) -> None:
        world.resize_inference(grant.gpu for grant in change.members)

    def is_there(self, world: World, change: Change) -> bool:
        return set(world.inference.gpus) == {grant.gpu for grant in change.members}

    def clear(self, world: World, gpu: GpuId) -> None:
        world.resize_inference(other for other in world.inference.target_gpus if other != gpu)


@dataclass
class ActorMoves:
    triggers: frozenset[What] = frozenset({What.TRAINER_RESIZED, What.GPUS_FREED})

    def begin(self, world: World, change: Change) -> None:
        world.resize_trainer((grant.gpu for grant in change.members), change.layout)

    def is_there(self, world: World, change: Change) -> bool:
        trainer = world.trainer
        has = (trainer.gpus, trainer.layout)
        return has == (tuple(grant.gpu for grant in change.members), change.layout) and has == trainer.target

    def clear(self, world: World, gpu: GpuId) -> None:
        """A trainer that lost a GPU has given up all of them."""
