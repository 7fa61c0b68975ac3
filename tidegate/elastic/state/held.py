"""Where a job's state is: in a mesh of an epoch, on ranks that have announced their tensors, some of them dead perhaps.

Invariant: all members of an epoch agree on it; it changes only at a reshard's commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig
from pydantic import TypeAdapter

from tidegate.elastic.epoch.world import World
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
from tidegate.elastic.state.stamp import Stamp


@dataclass(frozen=True, slots=True)
class RankState:
    """One member's tensors in one mesh, and where they lie."""

    skeleton: Skeleton
    arena: Arena
    stamp: Stamp
    copies: Copies | None

    def announcement(self, host: str) -> Announcement:
        """With the tensors' places, where other processes of the host can read them."""
        tensors, ranges = self.skeleton.tensors(), self.skeleton.ranges()
        extents = {key: Extent(tensor.numel(), tensor.dtype) for key, tensor in tensors.items()}
        copies = ""
        if self.copies is not None and isinstance(self.copies.arena, SharedArena):
            copies = str(self.copies.arena.path)
        if not isinstance(self.arena, SharedArena):
            return Announcement(host, ranges, extents, copies=copies)
        places = {key: self.arena.place(tensor) for key, tensor in tensors.items()}
        return Announcement(host, ranges, extents, places, self.arena.place(self.stamp.record), copies)

    def materialise(self) -> None:
        """Take memory for the tensors and their copies. Raises ArenaFull, and has none then."""
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

    def set_aside(self) -> None:
        """Forget what the tensors hold and keep their memory, for the layout to be taken up again; the rest is given
        back."""
        self.stamp.spoil()
        self.skeleton.release_gradients()
        if self.copies is not None:
            self.copies.arena.release()

    def discard(self) -> None:
        """Give the memory back for good, and the files' names."""
        self.skeleton.release()
        for arena in (self.arena, None if self.copies is None else self.copies.arena):
            if isinstance(arena, SharedArena):
                discard(arena)


def discard(arena: SharedArena) -> None:
    """Give its memory back for good, and its file's name."""
    arena.release()
    arena.unlink()
    arena.close()


@dataclass(frozen=True, slots=True)
class Held:
    """Where the job's state is: in which mesh, of which epoch, and what its ranks announced of their tensors."""

    epoch: int
    mesh: Mesh
    announcements: Mapping[int, Announcement]
    state: RankState | None
    """This member's own; None where it is not in the mesh."""

    def tensors(self) -> Mapping[TensorKey, torch.Tensor]:
        """This member's; none where it is not in the mesh."""
        return {} if self.state is None else self.state.skeleton.tensors()

    def as_end(self, optimizer_config: OptimizerConfig) -> State:
        """This mesh with what its ranks announced of their optimizer, as the planner takes either end of a reshard."""
        ranges = {rank: entry.ranges for rank, entry in self.announcements.items()}
        return State(self.mesh, DistributedOptimizer(ranges, *optimizer_form(optimizer_config)))

    def hosts(self) -> dict[int, str]:
        """By rank, the dead ones' too."""
        return {rank: entry.host for rank, entry in self.announcements.items()}

    def release(self) -> None:
        """Give this member's memory back; the tensors stay, to be used again."""
        if self.state is not None:
            self.state.release()

    def discard(self) -> None:
        """Give this member's memory back for good."""
        if self.state is not None:
            self.state.discard()


_WIRED = TypeAdapter(tuple[int, Mesh, str])


def shared(world: World, held: Held | None) -> Held | None:
    """What the members of a new epoch know of the state, for those that have just joined; None: there is none yet."""
    payload = b""
    if held is not None:
        payload = _WIRED.dump_json((held.epoch, held.mesh, catalogue.encode_all(held.announcements).decode()))
    known = [said for said in world.gather(world.membership.members, payload).values() if said]
    if held is not None or not known:
        return held
    epoch, mesh, announcements = _WIRED.validate_json(known[0])
    return Held(epoch, mesh, catalogue.decode_all(announcements.encode()), None)
