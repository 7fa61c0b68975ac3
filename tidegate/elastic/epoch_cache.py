"""Caches what a member has built for the layouts of one membership epoch, so that a switch only allocates and copies.

- For each mesh: its groups, this member's tensors, and the announcements of all its ranks.
- For each pair of meshes: this member's part of the plan.

All members call `introduce` with the same arguments, members outside the mesh too.

Invariants:
- A skeleton's groups are the world's own groups at each use; otherwise the skeleton is built anew.
  [test_leaks: switches_leak_nothing]
- Of the tensors that are not in use, only those of the last layout and of layouts that were built ahead may keep
  memory; during a reshard only those of its target. [test_leaks: keep_the_memory_of_the_last_layout]
  [test_ahead: a_switch_gives_back]
- If building fails on one member, it fails on all members and leaves nothing.
  [test_refusals: a_failure_of_one_member_while_it_builds]
- An arena's file belongs to one member, in one mesh of one epoch. [test_memory: never_takes_an_existing_file]
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from tidegate.elastic.epoch.joint_step import run_on_all
from tidegate.elastic.epoch.world import World
from tidegate.elastic.model.memory import Arena, ArenaFull, OwnArena, SharedArena
from tidegate.elastic.model.provider import ModelProvider
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.plan import Part
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.plan.recovery import guardians
from tidegate.elastic.report import Stopwatch
from tidegate.elastic.settings import CopyTo, ElasticSettings
from tidegate.elastic.state import catalogue
from tidegate.elastic.state.arena_files import arena_path
from tidegate.elastic.state.carried import CarriedGradients
from tidegate.elastic.state.catalogue import Announcement, Extent
from tidegate.elastic.state.copies import Copies
from tidegate.elastic.state.host_copy import HostCopy
from tidegate.elastic.state.location import RankState, StateLocation, discard
from tidegate.elastic.state.stamp import RECORD_BYTES, Stamp
from tidegate.megatron.groups import groups_of, megatron_groups
from tidegate.megatron.reproducible import wrapper


class EpochCache:
    """The module's head describes it."""

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

    def knows(self, mesh: Mesh) -> bool:
        """Whether the groups and tensors of the mesh exist. The answer is the same on every member."""
        return mesh in self._announced and self.world.is_prepared(_groups(mesh))

    def introduce(self, mesh: Mesh, *, beside: Mesh | None, watch: Stopwatch) -> StateLocation:
        """Return a location that can hold the state in this mesh. Tensors that are new here have no memory yet.

        The groups of the mesh `beside`, which is in use, stay.
        """
        with watch.part("groups"):
            groups = _groups(mesh)
            is_known = self.world.is_prepared(groups)
            self.world.prepare(groups if beside is None else groups | _groups(beside))
            if not is_known:
                self._forget_dropped(mesh)
        with watch.part("build"):
            if mesh not in self._announced:
                self._build(mesh)
        return StateLocation(self.world.membership.epoch, mesh, self._announced[mesh], self._states.get(mesh))

    def part(self, source: StateLocation, target: StateLocation, hosts: Mapping[int, str]) -> Part | None:
        """This member's part in moving the state from `source` to `target`; None where the member is in neither.

        `hosts` are the hosts on which the source's ranks, dead ones too, can be read.
        """
        if self.world.me not in {*source.mesh.ranks, *target.mesh.ranks}:
            return None
        key = (source.epoch, source.mesh, target.mesh)
        # A source of another epoch has dead ranks, whose hosts differ. It is used once, so caching would gain nothing.
        if key not in self._parts or source.epoch != self.world.membership.epoch:
            self._parts[key] = self.parts_of(source, target, hosts, [self.world.me])[self.world.me]
        return self._parts[key]

    def parts_of(
        self, source: StateLocation, target: StateLocation, hosts: Mapping[int, str], ranks: Iterable[int]
    ) -> dict[int, Part]:
        """The parts of other ranks, which this member replaces."""
        planner = Planner(
            self._parameters, source.as_end(self._optimizer_config), target.as_end(self._optimizer_config), hosts=hosts
        )
        return {rank: planner.part(rank) for rank in ranks}

    def empty_gradients(self, skeleton: Skeleton) -> CarriedGradients:
        """Memory for the reduced gradients of a skeleton of this epoch, filled with 0. Raises ArenaFull."""
        arena = self._arena(skeleton.mesh, self._settings.shared_memory, self.world.device)
        try:
            return CarriedGradients(arena, skeleton.empty_gradients(arena))
        except ArenaFull:
            if isinstance(arena, SharedArena):
                discard(arena)
            raise

    def leave(self, location: StateLocation) -> None:
        """After a switch: keep as much memory of the old location as the settings say. It belongs to this epoch."""
        if location.state is None:
            return
        if self._settings.keeps_last:
            location.state.set_aside()
        else:
            location.state.release()

    def make_room(self, source: StateLocation, mesh: Mesh) -> None:
        """Before a reshard to the mesh: give back the memory that other layouts kept."""
        for other, state in self._states.items():
            if other != mesh and state is not source.state:
                state.release()

    def discard(self, *, but: RankState | None = None) -> None:
        """At the end of the epoch: give everything back except the tensors that hold the job's state."""
        self._forget({mesh for mesh, state in self._states.items() if state is not but})

    def _build(self, mesh: Mesh) -> None:
        """Build this member's tensors and receive the others' announcements. Both are cached for the next switch.

        Raises MemberFailed, and the error of this member. Nothing is left behind then.
        """
        groups = megatron_groups(self.world, mesh)
        begun: list[tuple[Skeleton, Arena]] = []
        made: list[Arena] = []

        def arena_in(folder: Path | None, device: torch.device) -> Arena:
            made.append(self._arena(mesh, folder, device))
            return made[-1]

        def begin() -> bytes:
            if groups is not None:
                arena = arena_in(self._settings.shared_memory, self.world.device)
                begun.append((self._skeleton(mesh, groups, arena), arena))
            return b""

        def complete() -> bytes:
            if not begun:
                return b""
            skeleton, arena = begun[0]
            complete, stamp = skeleton.complete(), self._stamp(arena)
            state = RankState(complete, arena, stamp, self._copies(complete, arena_in), self._kept(complete, arena))
            self._states[mesh] = state
            return catalogue.encode(state.announcement(self.hosts[self.world.me]))

        try:
            run_on_all(self.world, begin)
            announced = run_on_all(self.world, complete)
        except Exception:
            self._states.pop(mesh, None)
            for arena in made:
                if isinstance(arena, SharedArena):
                    discard(arena)
            raise
        self._announced[mesh] = {rank: catalogue.decode(announced[rank]) for rank in mesh.ranks}
        if groups is not None:
            self._send_copies(mesh)
            self._states[mesh].release()

    def _skeleton(self, mesh: Mesh, groups: ProcessGroupCollection, arena: Arena) -> Skeleton:
        return Skeleton(
            self._provider,
            mesh,
            self.world.me,
            groups,
            self._optimizer_config,
            device=self.world.device,
            arena=arena,
            wrapper=wrapper(self._settings.num_logical_shards),
        )

    def _stamp(self, arena: Arena) -> Stamp:
        """In shared memory, so that others can read it; otherwise in host memory: the device does not need it."""
        is_shared = isinstance(arena, SharedArena)
        return Stamp(
            arena.empty(RECORD_BYTES, torch.uint8) if is_shared else torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        )

    def _copies(self, skeleton: Skeleton, arena_in: Callable[[Path | None, torch.device], Arena]) -> Copies | None:
        """In a file in host memory where there is a folder for it, so that they outlive this process."""
        if self._settings.copies is CopyTo.NOWHERE:
            return None
        folder = self._settings.shared_memory or self._settings.host_memory
        return Copies(arena_in(folder, torch.device("cpu")), _extents(skeleton))

    def _kept(self, skeleton: Skeleton, arena: Arena) -> HostCopy | None:
        """An arena in shared memory is in host memory already."""
        if isinstance(arena, SharedArena):
            return None
        folder = self._settings.host_memory
        path = None if folder is None else self._arena_path(folder, skeleton.mesh)
        return HostCopy(_extents(skeleton), path, device=self.world.device)

    def _send_copies(self, mesh: Mesh) -> None:
        announced = self._announced[mesh]
        guardian = guardians({rank: entry.host for rank, entry in announced.items()})
        copies, me = self._states[mesh].copies, self.world.me
        if copies is not None and self._settings.copies is CopyTo.PEER and guardian:
            ward = next(rank for rank, keeper in guardian.items() if keeper == me)
            copies.send_to(guardian[me], ward=ward, ward_tensors=announced[ward].tensors)

    def _arena(self, mesh: Mesh, folder: Path | None, device: torch.device) -> Arena:
        """A file in the folder; without one, this process's memory on the device."""
        return OwnArena(device) if folder is None else SharedArena(self._arena_path(folder, mesh))

    def _arena_path(self, folder: Path, mesh: Mesh) -> Path:
        self._num_arenas += 1
        return arena_path(folder, self.world.membership.epoch, self.world.me, self._num_arenas, mesh)

    def _forget_dropped(self, mesh: Mesh) -> None:
        """Forget the tensors of meshes whose groups the world dropped to make room for `mesh`, and those of `mesh`
        itself.
        """
        whole = {other for other in self._announced if other != mesh and self.world.is_prepared(_groups(other))}
        self._forget(self._announced.keys() - whole)

    def _forget(self, meshes: AbstractSet[Mesh]) -> None:
        for mesh in meshes:
            if state := self._states.pop(mesh, None):
                state.discard()
            self._announced.pop(mesh, None)
        self._parts = {key: part for key, part in self._parts.items() if meshes.isdisjoint(key[1:])}
        if meshes:
            # Megatron's models and optimizers are reference cycles, and they hold groups with descriptors and threads.
            gc.collect()


def _extents(skeleton: Skeleton) -> dict[TensorKey, Extent]:
    return {key: Extent(tensor.numel(), tensor.dtype) for key, tensor in skeleton.tensors().items()}


def _groups(mesh: Mesh) -> set[tuple[int, ...]]:
    return {group for roles in groups_of(mesh).values() for group in roles.values()}
