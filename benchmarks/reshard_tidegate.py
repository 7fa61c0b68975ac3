"""Our side: an ElasticTrainer's reshard, by shared memory and by gloo, and its transport for the weights alone.

One side has the target layout built ahead, as a job whose policy foresees it. On the others the first switch makes
groups and tensors, and later ones reuse them. By default they also reuse the memory of the last switch. One side
allocates it in each switch, as a switch to a third layout does. Into kept memory a switch is proved after it, as in a
job; `proof` is the time of that with nothing beside it. After each switch its floor is measured: the same bytes to each
rank by the same means, without strides, into new memory. Weights alone move between existing tensors at both ends, as
in Megatron's refit.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.reshard_sides import Crew, Parts
from benchmarks.reshard_state import NUM_STEPS, LogicalState, adam
from benchmarks.transport_floor import Traffic, peer_to_peer_seconds, shared_memory_seconds
from tidegate.elastic.carry.shared_memory import SharedMemory
from tidegate.elastic.epoch.world import Membership, World
from tidegate.elastic.model.memory import ArenaReader, OwnArena, Place, SharedArena
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.plan import Holding, Part
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state import catalogue
from tidegate.elastic.state.catalogue import Announcement, Extent
from tidegate.elastic.state.location import StateLocation
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.trainer import ElasticTrainer


class ByGloo:
    """Every byte is sent."""

    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state
        self._world = _join(crew)
        self._trainer = ElasticTrainer(state.provider, adam(), world=self._world, settings=self._settings())

    def prepare(self, source: Mesh, target: Mesh) -> None:
        if self._trainer.location is None:
            self._trainer.start(source.layout, fill=self._fill)
        else:
            self._trainer.reshard(source.layout)
            self._trainer.prove()
        self._source, self._target = self._now(), target

    def switch(self) -> dict[str, float]:
        return dict(self._trainer.reshard(self._target.layout).seconds)

    def floor(self) -> dict[str, float]:
        watch = Parts()
        with watch.part("proof"):
            self._trainer.prove()
        return watch.seconds | self._floors(Traffic.of(self._part()))

    def check(self) -> None:
        location = self._now()
        if location.state is not None:
            skeleton = location.state.skeleton
            self._state.check(skeleton.chunks, skeleton.optimizer, location.mesh, self._crew.rank)

    def close(self) -> None:
        self._trainer.close()
        self._world.leave()

    def _settings(self) -> ElasticSettings:
        return ElasticSettings(timeout_s=self._crew.timeout_s)

    def _floors(self, traffic: Traffic) -> dict[str, float]:
        members = self._world.membership.members
        seconds = peer_to_peer_seconds(
            traffic,
            group=self._world.group(members),
            members=members,
            source=OwnArena(self._crew.device),
            target=OwnArena(self._crew.device),
            barrier=self._crew.meet,
        )
        return {"floor": seconds}

    def _now(self) -> StateLocation:
        assert self._trainer.location is not None
        return self._trainer.location

    def _fill(self, location: StateLocation) -> Progress:
        if location.state is not None:
            skeleton = location.state.skeleton
            self._state.fill(skeleton.chunks, skeleton.optimizer, location.mesh, self._crew.rank)
        return Progress(num_updates=int(NUM_STEPS))

    def _part(self) -> Part:
        """This rank's part in the last switch."""
        ends = [location.as_end(adam()) for location in (self._source, self._now())]
        return _part(self._crew, self._state, *ends)


class BySharedMemory(ByGloo):
    """Each rank reads the tensors of the others in place."""

    def _settings(self) -> ElasticSettings:
        folder = self._crew.folder / type(self).__name__
        folder.mkdir(exist_ok=True)
        return ElasticSettings(shared_memory=folder, proves_late=True, timeout_s=self._crew.timeout_s)

    def _floors(self, traffic: Traffic) -> dict[str, float]:
        return {
            "floor": self._floor_s(traffic.region_sizes),
            "floor_one_stretch": self._floor_s((traffic.arriving_bytes,)),
        }

    def _floor_s(self, sizes: Sequence[int]) -> float:
        arenas = [SharedArena(self._crew.folder / f"floor-{self._crew.rank}-{end}") for end in ("from", "to")]
        try:
            return shared_memory_seconds(sizes, source=arenas[0], target=arenas[1], barrier=self._crew.meet)
        finally:
            for arena in arenas:
                arena.unlink()
                arena.close()


class Foreseen(BySharedMemory):
    """As `BySharedMemory`, but the target layout is built ahead, with its memory, before the first switch."""

    def prepare(self, source: Mesh, target: Mesh) -> None:
        is_first = self._trainer.location is None
        super().prepare(source, target)
        if is_first:
            self._trainer.build_ahead(target, keeps_memory=True)


class IntoFreshMemory(BySharedMemory):
    """As `BySharedMemory`, but no rank keeps the memory of its last layout."""

    def _settings(self) -> ElasticSettings:
        return replace(super()._settings(), keeps_last=False)


class WeightsAlone:
    """The first switch plans, and later ones reuse the plan."""

    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state
        self._world = _join(crew)
        self._arenas = [SharedArena(crew.folder / f"weights-{crew.rank}-{end}") for end in ("from", "to")]
        self._sources: Tensors = {}
        self._targets: Tensors = {}
        self._planned: Part | None = None

    def prepare(self, source: Mesh, target: Mesh) -> None:
        if not self._sources and not self._targets:
            self._ends = State(source), State(target)
            part = _part(self._crew, self._state, *self._ends)
            self._sources = _allocate(self._arenas[0], part.source_holdings)
            self._targets = _allocate(self._arenas[1], part.target_holdings)
            self._transport = SharedMemory(self._places(), ArenaReader())
            for (name, kind), tensor in self._sources.items():
                tensor.copy_(self._state.shard(name, kind, source, self._crew.rank))
        for tensor in self._targets.values():
            tensor.zero_()

    def switch(self) -> dict[str, float]:
        watch = Parts()
        with watch.part("plan"):
            if self._planned is None:
                self._planned = _part(self._crew, self._state, *self._ends)
        with watch.part("transfer"):
            self._transport.run(self._planned, self._sources, self._targets)
            self._world.barrier(self._world.membership.members)
        return watch.seconds

    def floor(self) -> dict[str, float]:
        return {}

    def check(self) -> None:
        for (name, kind), tensor in self._targets.items():
            want = self._state.shard(name, kind, self._ends[1].mesh, self._crew.rank)
            assert torch.equal(tensor, want), f"{name} in {self._ends[1].mesh.layout} is not as it was"

    def close(self) -> None:
        self._world.leave()
        for arena in self._arenas:
            arena.unlink()
            arena.close()

    def _places(self) -> dict[int, dict[TensorKey, Place]]:
        extents = {key: Extent(tensor.numel(), tensor.dtype) for key, tensor in self._sources.items()}
        places = {key: self._arenas[0].place(tensor) for key, tensor in self._sources.items()}
        mine = catalogue.encode(Announcement(socket.gethostname(), {}, extents, places))
        gathered = self._world.gather(self._world.membership.members, mine)
        return {rank: dict(catalogue.decode(payload).places) for rank, payload in gathered.items()}


def _join(crew: Crew) -> World:
    """Join all ranks of the case, also those on standby."""
    membership = Membership(1, tuple(range(crew.size)))
    return World.join(membership, me=crew.rank, store=crew.new_world(), device=crew.device, timeout_s=crew.timeout_s)


def _part(crew: Crew, state: LogicalState, source: State, target: State) -> Part:
    hosts = dict.fromkeys(range(crew.size), socket.gethostname())
    return Planner(state.provider.parameters(), source, target, hosts=hosts).part(crew.rank)


def _allocate(arena: SharedArena, holdings: tuple[Holding, ...]) -> Tensors:
    return {(holding.name, holding.kind): arena.empty(holding.num_elements, torch.float32) for holding in holdings}
