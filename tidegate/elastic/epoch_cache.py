"""What a member has made for the layouts of one membership epoch, so that a switch allocates and copies only.

For each mesh: its groups, this member's tensors, what all its ranks announced of theirs; for each pair of meshes, this
member's part of the plan. All members call `introduce` alike, those outside the mesh too.
Invariants: a skeleton's groups are the world's own at each use, else it is built anew; tensors that are not in use hold
no memory; an arena's file is one member's, in one mesh of one epoch.
"""

from __future__ import annotations

import hashlib
import socket

import torch
from megatron.core.optimizer import OptimizerConfig

from tidegate.elastic import catalogue
from tidegate.elastic.adam import optimizer_form
from tidegate.elastic.catalogue import Announcement
from tidegate.elastic.held import Held, RankState
from tidegate.elastic.holders import State
from tidegate.elastic.layout import Mesh
from tidegate.elastic.memory import Arena, OwnArena, SharedArena
from tidegate.elastic.optimizers import DistributedOptimizer
from tidegate.elastic.plan import Part
from tidegate.elastic.planner import Planner
from tidegate.elastic.provider import ModelProvider
from tidegate.elastic.report import Stopwatch
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.skeleton import Skeleton
from tidegate.elastic.stamp import NUM_COUNTS, Stamp
from tidegate.elastic.world import World
from tidegate.megatron.groups import groups_of, megatron_groups
from tidegate.megatron.reproducible import wrapper


class EpochCache:
    """See the module."""

    def __init__(
        self,
        provider: ModelProvider,
        optimizer_config: OptimizerConfig,
        world: World,
        settings: ElasticSettings,
    ) -> None:
        self.world = world
        self._parameters = provider.parameters()
        self._provider = provider
        self._optimizer_config = optimizer_config
        self._settings = settings
        self._states: dict[Mesh, RankState] = {}
        self._announced: dict[Mesh, dict[int, Announcement]] = {}
        self._parts: dict[tuple[int, Mesh, Mesh], Part] = {}
        self._num_arenas = 0
        hosts = world.gather(world.membership.members, socket.gethostname().encode())
        self.hosts = {member: host.decode() for member, host in hosts.items()}

    def introduce(self, mesh: Mesh, *, beside: Mesh | None, watch: Stopwatch) -> Held:
        """A mesh that can hold the state; this member's tensors in it are without memory where they are new.

        The groups of the mesh `beside`, which is in use, stay.
        """
        with watch.part("groups"):
            wanted = _groups(mesh)
            if not self.world.is_prepared(wanted):
                self._forget(mesh)
            self.world.prepare(wanted if beside is None else wanted | _groups(beside))
        with watch.part("build"):
            if mesh not in self._announced:
                self._build(mesh)
        return Held(self.world.membership.epoch, mesh, self._announced[mesh], self._states.get(mesh))

    def part(self, source: Held, target: Held) -> Part | None:
        """What this member does to bring the state from one to the other; None where it is in neither."""
        if self.world.me not in {*source.mesh.ranks, *target.mesh.ranks}:
            return None
        key = (source.epoch, source.mesh, target.mesh)
        if key not in self._parts:
            planner = Planner(self._parameters, self._end(source), self._end(target), hosts=source.hosts() | self.hosts)
            self._parts[key] = planner.part(self.world.me)
        return self._parts[key]

    def discard(self, *, but: RankState | None = None) -> None:
        """At the epoch's end: give everything back but the tensors that hold the job's state."""
        for mesh in list(self._states):
            if self._states[mesh] is not but:
                self._forget(mesh)

    def _build(self, mesh: Mesh) -> None:
        """Make this member's tensors and learn of the others', to be found at the next switch too."""
        payload = b""
        groups = megatron_groups(self.world, mesh)
        if groups is not None:
            arena = self._arena(mesh)
            skeleton = Skeleton(
                self._provider,
                mesh,
                self.world.me,
                groups,
                self._optimizer_config,
                device=self.world.device,
                arena=arena,
                wrapper=wrapper(self._settings.num_logical_shards),
            )
            state = RankState(skeleton, arena, Stamp(arena.empty(NUM_COUNTS, torch.int64)))
            payload = catalogue.encode(state.announcement(self.hosts[self.world.me]))
            skeleton.release()
            self._states[mesh] = state
        announced = self.world.gather(self.world.membership.members, payload)
        self._announced[mesh] = {rank: catalogue.decode(announced[rank]) for rank in mesh.ranks}

    def _end(self, held: Held) -> State:
        ranges = {rank: entry.ranges for rank, entry in held.announcements.items()}
        return State(held.mesh, DistributedOptimizer(ranges, *optimizer_form(self._optimizer_config)))

    def _arena(self, mesh: Mesh) -> Arena:
        folder = self._settings.shared_memory
        if folder is None:
            return OwnArena(self.world.device)
        digest = hashlib.sha256(repr(mesh).encode()).hexdigest()[:12]
        self._num_arenas += 1
        return SharedArena(
            folder / f"epoch{self.world.membership.epoch}-member{self.world.me}-{self._num_arenas}-{digest}"
        )

    def _forget(self, mesh: Mesh) -> None:
        if state := self._states.pop(mesh, None):
            state.discard()
        self._announced.pop(mesh, None)
        self._parts = {key: part for key, part in self._parts.items() if mesh not in key[1:]}


def _groups(mesh: Mesh) -> set[tuple[int, ...]]:
    return {group for roles in groups_of(mesh).values() for group in roles.values()}
