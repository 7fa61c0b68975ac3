"""What a member has made for the layouts of one membership epoch, so that a switch allocates and copies only.

For each mesh: its groups, this member's tensors, what all its ranks announced of theirs; for each pair of meshes, this
member's part of the plan. All members call `introduce` alike, those outside the mesh too.
Invariants: a skeleton's groups are the world's own at each use, else it is built anew; of the tensors that are not in
use only those of the layout left last may hold memory; what fails one member while it builds fails all, and leaves
nothing; an arena's file is one member's, in one mesh of one epoch.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from tidegate.elastic.epoch.together import of_all
from tidegate.elastic.epoch.world import World
from tidegate.elastic.model.memory import Arena, OwnArena, SharedArena
from tidegate.elastic.model.provider import ModelProvider
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.plan import Part
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.plan.recovery import guardians
from tidegate.elastic.report import Stopwatch
from tidegate.elastic.settings import CopyTo, ElasticSettings
from tidegate.elastic.state import catalogue
from tidegate.elastic.state.arena_files import arena_path
from tidegate.elastic.state.catalogue import Announcement, Extent
from tidegate.elastic.state.copies import Copies
from tidegate.elastic.state.held import Held, RankState, discard
from tidegate.elastic.state.stamp import RECORD_BYTES, Stamp
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
            is_known = self.world.is_prepared(wanted)
            self.world.prepare(wanted if beside is None else wanted | _groups(beside))
            if not is_known:
                self._forget_dropped(mesh)
        with watch.part("build"):
            if mesh not in self._announced:
                self._build(mesh)
        return Held(self.world.membership.epoch, mesh, self._announced[mesh], self._states.get(mesh))

    def part(self, source: Held, target: Held, hosts: Mapping[int, str]) -> Part | None:
        """What this member does to bring the state from one to the other; None where it is in neither.

        `hosts` are those on which the source's ranks, dead ones too, can be read."""
        if self.world.me not in {*source.mesh.ranks, *target.mesh.ranks}:
            return None
        key = (source.epoch, source.mesh, target.mesh)
        # A source of another epoch has dead ranks, whose hosts are not its own; it is left once, so nothing is lost.
        if key not in self._parts or source.epoch != self.world.membership.epoch:
            self._parts[key] = self.parts_of(source, target, hosts, [self.world.me])[self.world.me]
        return self._parts[key]

    def parts_of(self, source: Held, target: Held, hosts: Mapping[int, str], ranks: Iterable[int]) -> dict[int, Part]:
        """Those of other ranks, for whom this member stands in."""
        planner = Planner(
            self._parameters, source.as_end(self._optimizer_config), target.as_end(self._optimizer_config), hosts=hosts
        )
        return {rank: planner.part(rank) for rank in ranks}

    def leave(self, left: Held) -> None:
        """After a switch: of the memory of what was left, keep what the settings say. It is of this epoch."""
        if left.state is None:
            return
        if self._settings.keeps_last and isinstance(left.state.arena, SharedArena):
            left.state.set_aside()
        else:
            left.state.release()

    def make_room(self, source: Held, mesh: Mesh) -> None:
        """Before a reshard to the mesh: what other layouts kept is given back."""
        for other, state in self._states.items():
            if other != mesh and state is not source.state:
                state.release()

    def discard(self, *, but: RankState | None = None) -> None:
        """At the epoch's end: give everything back but the tensors that hold the job's state."""
        self._forget({mesh for mesh, state in self._states.items() if state is not but})

    def _build(self, mesh: Mesh) -> None:
        """Make this member's tensors and learn of the others', to be found at the next switch too.

        Raises MemberFailed, and what failed this one; nothing is left then."""
        groups = megatron_groups(self.world, mesh)
        begun: list[tuple[Skeleton, Arena]] = []
        made: list[Arena] = []

        def arena_on(device: torch.device) -> Arena:
            made.append(self._arena(mesh, device))
            return made[-1]

        def begin() -> bytes:
            if groups is not None:
                arena = arena_on(self.world.device)
                begun.append((self._skeleton(mesh, groups, arena), arena))
            return b""

        def complete() -> bytes:
            if not begun:
                return b""
            skeleton, arena = begun[0]
            state = RankState(skeleton.complete(), arena, self._stamp(arena), self._copies(skeleton, arena_on))
            self._states[mesh] = state
            return catalogue.encode(state.announcement(self.hosts[self.world.me]))

        try:
            of_all(self.world, begin)
            announced = of_all(self.world, complete)
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
        """In shared memory, for others to read, or in the host's, for it is not the device's business."""
        is_shared = isinstance(arena, SharedArena)
        return Stamp(
            arena.empty(RECORD_BYTES, torch.uint8) if is_shared else torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        )

    def _copies(self, skeleton: Skeleton, arena_on: Callable[[torch.device], Arena]) -> Copies | None:
        if self._settings.copies is CopyTo.NOWHERE:
            return None
        extents = {key: Extent(tensor.numel(), tensor.dtype) for key, tensor in skeleton.tensors().items()}
        return Copies(arena_on(torch.device("cpu")), extents)

    def _send_copies(self, mesh: Mesh) -> None:
        announced = self._announced[mesh]
        guardian = guardians({rank: entry.host for rank, entry in announced.items()})
        copies, me = self._states[mesh].copies, self.world.me
        if copies is not None and self._settings.copies is CopyTo.PEER and guardian:
            ward = next(rank for rank, keeper in guardian.items() if keeper == me)
            copies.send_to(guardian[me], ward=ward, ward_tensors=announced[ward].tensors)

    def _arena(self, mesh: Mesh, device: torch.device) -> Arena:
        folder = self._settings.shared_memory
        if folder is None:
            return OwnArena(device)
        self._num_arenas += 1
        return SharedArena(arena_path(folder, self.world.membership.epoch, self.world.me, self._num_arenas, mesh))

    def _forget_dropped(self, mesh: Mesh) -> None:
        """The tensors of meshes of which the world has dropped groups, to make room for those of `mesh`, or its own."""
        whole = {other for other in self._announced if other != mesh and self.world.is_prepared(_groups(other))}
        self._forget(self._announced.keys() - whole)

    def _forget(self, meshes: AbstractSet[Mesh]) -> None:
        for mesh in meshes:
            if state := self._states.pop(mesh, None):
                state.discard()
            self._announced.pop(mesh, None)
        self._parts = {key: part for key, part in self._parts.items() if meshes.isdisjoint(key[1:])}
        if meshes:
            # Megatron's models and optimizers refer to themselves, and to groups that have descriptors and threads.
            gc.collect()


def _groups(mesh: Mesh) -> set[tuple[int, ...]]:
    return {group for roles in groups_of(mesh).values() for group in roles.values()}
