"""Where a job's state is: in a mesh of an epoch, on ranks that announced their tensors. Some of them may be dead.

Invariants:
- All members of an epoch agree on the location. [test_kill_matrix: a_kill_leaves_the_old_or_the_new_layout]
- It changes only at a reshard's commit, and in the next epoch where the reshard is undone.
  [test_refusals: a_failure_of_one_member_before_the_decision] [test_late_proof: wrong_element]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig
from pydantic import TypeAdapter

from tidegate.elastic.epoch.world import World
from tidegate.elastic.model import param_groups
from tidegate.elastic.model.adam import optimizer_form
from tidegate.elastic.model.memory import Arena, ArenaFull, SharedArena
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import DistributedOptimizer
from tidegate.elastic.state import catalogue
from tidegate.elastic.state.catalogue import Announcement, Extent
from tidegate.elastic.state.copies import Copies
from tidegate.elastic.state.host_copy import HostCopy
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.stamp import Note, Stamp


@dataclass(frozen=True, slots=True)
class RankState:
    """One member's tensors in one mesh, and where they lie."""

    skeleton: Skeleton
    arena: Arena
    stamp: Stamp
    copies: Copies | None
    kept: HostCopy | None = None
    """The tensors while the job is suspended. None: the arena itself is host memory that outlives this process."""

    def announcement(self, host: str) -> Announcement:
        """The announcement has the tensors' places where other processes of the host can read them."""
        tensors, ranges = self.skeleton.tensors(), self.skeleton.ranges()
        extents = {key: Extent(tensor.numel(), tensor.dtype) for key, tensor in tensors.items()}
        copies = ""
        if self.copies is not None and isinstance(self.copies.arena, SharedArena):
            copies = str(self.copies.arena.path)
        kept = "" if self.kept is None or self.kept.path is None else str(self.kept.path)
        if not isinstance(self.arena, SharedArena):
            return Announcement(host, ranges, extents, copies=copies, kept=kept)
        places = {key: self.arena.place(tensor) for key, tensor in tensors.items()}
        return Announcement(host, ranges, extents, places, self.arena.place(self.stamp.record), copies, kept)

    def materialise(self) -> None:
        """Take memory for the tensors and their copies. Raises ArenaFull; no memory is taken then."""
        try:
            self.skeleton.materialise()
            if self.copies is not None:
                self.copies.arena.materialise()
        except ArenaFull:
            self.release()
            raise

    def release(self) -> None:
        """Give the memory back; again is no harm."""
        self.skeleton.release()
        if self.copies is not None:
            self.copies.arena.release()

    def renote(self, progress: Progress) -> Note | None:
        """Note what the caller changed since the last update, for example in the parameter groups.

        Returns the note of the tensors; None where they belong to no update.
        """
        note = self.stamp.read()
        # A member that lost a peer during an update may have applied it without counting it.
        if note is not None and note.progress.num_updates == progress.num_updates:
            note = Note(progress, param_groups.values_of(self.skeleton.optimizer))
            self.stamp.renote(note)
        return note

    def keep(self, progress: Progress) -> None:
        """Have the tensors in host memory. Nothing else changes. Raises ArenaFull."""
        note = self.renote(progress)
        # Tensors of no update are of no use. Copies of earlier updates are in host memory already.
        if self.kept is not None and note is not None:
            self.kept.take(self.skeleton.tensors(), note)

    def rest(self) -> None:
        """Keep only what is in host memory; again is no harm."""
        self.skeleton.release_gradients()
        if self.kept is not None:
            self.stamp.spoil()
            self.skeleton.release()

    def set_aside(self) -> None:
        """Forget the content, and keep memory for the layout to be taken up again: that of the tensors where it is
        shared, else that of the copies. The rest is given back.

        The memory of both, beside gradients, would be more than a reshard takes.
        """
        self.stamp.spoil()
        if isinstance(self.arena, SharedArena):
            self.skeleton.release_gradients()
            if self.copies is not None:
                self.copies.arena.release()
        else:
            self.skeleton.release()
            if self.copies is not None:
                self.copies.spoil()

    def discard(self) -> None:
        """Give the memory back for good, and remove the files' names."""
        self.skeleton.release()
        if self.kept is not None:
            self.kept.release()
        for arena in (self.arena, None if self.copies is None else self.copies.arena):
            if isinstance(arena, SharedArena):
                discard(arena)


def discard(arena: SharedArena) -> None:
    """Give the arena's memory back for good, and remove its file's name."""
    arena.release()
    arena.unlink()
    arena.close()


@dataclass(frozen=True, slots=True)
class StateLocation:
    """The mesh and epoch that hold the job's state, and what its ranks announced of their tensors."""

    epoch: int
    mesh: Mesh
    announcements: Mapping[int, Announcement]
    state: RankState | None
    """This member's own state; None where the member is not in the mesh."""

    def tensors(self) -> Mapping[TensorKey, torch.Tensor]:
        """This member's tensors; none where the member is not in the mesh."""
        return {} if self.state is None else self.state.skeleton.tensors()

    def as_end(self, optimizer_config: OptimizerConfig) -> State:
        """This mesh and its ranks' announced optimizer ranges, as one end of a reshard for the planner."""
        ranges = {rank: entry.ranges for rank, entry in self.announcements.items()}
        return State(self.mesh, DistributedOptimizer(ranges, *optimizer_form(optimizer_config)))

    def hosts(self) -> dict[int, str]:
        """The hosts by rank, those of dead ranks too."""
        return {rank: entry.host for rank, entry in self.announcements.items()}

    def release(self) -> None:
        """Give this member's memory back. The tensors stay for later use."""
        if self.state is not None:
            self.state.release()

    def discard(self) -> None:
        """Give this member's memory back for good."""
        if self.state is not None:
            self.state.discard()

    def give_back(self, source: StateLocation) -> None:
        """Give back what this member took in order to continue here from `source`, which stays as it was."""
        if self.state is not None and self.state is source.state:
            self.state.rest()
        else:
            self.release()


_WIRED = TypeAdapter(tuple[int, Mesh, str])


def exchange_location(world: World, location: StateLocation | None) -> StateLocation | None:
    """The location of the state after all members of a new epoch have shared it. A new member learns it from the
    others.

    Returns None where no member has a state yet.
    """
    payload = b""
    if location is not None:
        announcements = catalogue.encode_all(location.announcements).decode()
        payload = _WIRED.dump_json((location.epoch, location.mesh, announcements))
    known = [answer for answer in world.gather(world.membership.members, payload).values() if answer]
    if location is not None or not known:
        return location
    epoch, mesh, announcements = _WIRED.validate_json(known[0])
    return StateLocation(epoch, mesh, catalogue.decode_all(announcements.encode()), None)
