"""Copies of a rank's tensors at the two last copied updates, in host memory of its node or also of a peer.

Order of a copy:
1. The older slot is marked as belonging to no update.
2. The slot is filled.
3. Its note is written.
4. With a guardian, the slot's bytes go to the guardian, and the bytes of the rank's ward come in. They travel in
   pieces, on all ranks of the mesh at once.

Invariants:
- While one slot is written the other is whole, so every rank of the mesh always has a whole copy of one common update.
  [test_kill_matrix: a_kill_where_copies_are_kept]
- A slot's own stamp describes its content. [test_stamp: being_overwritten_belong_to_no_update]
- The announcements determine the place of every slot. [test_deaths: training_continues_after_a_death]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tidegate.elastic.epoch.world import World, peers_needed
from tidegate.elastic.model.memory import ALIGNMENT_BYTES, Arena, Place
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.recovery import NUM_SLOTS
from tidegate.elastic.state.catalogue import Extent
from tidegate.elastic.state.stamp import RECORD_BYTES, Note, Stamp

_PIECE_BYTES = 16 << 20
"""The size of the pieces in which a copy is sent. It bounds the staging of a device without host memory."""


class Packing:
    """How tensors and their record lie in a slot, one after another."""

    def __init__(self, tensors: Mapping[TensorKey, Extent]) -> None:
        self._tensors = tensors
        self._offsets: dict[TensorKey, int] = {}
        end = 0
        for key, (num_elements, dtype) in tensors.items():
            self._offsets[key] = end
            end += _aligned(num_elements * dtype.itemsize)
        self._record = end
        self.num_bytes = _aligned(end + RECORD_BYTES)

    def tensors(self, slot: torch.Tensor) -> dict[TensorKey, torch.Tensor]:
        found = {}
        for key, (num_elements, dtype) in self._tensors.items():
            start = self._offsets[key]
            found[key] = slot[start : start + num_elements * dtype.itemsize].view(dtype)
        return found

    def stamp(self, slot: torch.Tensor) -> Stamp:
        return Stamp(slot[self._record : self._record + RECORD_BYTES])

    def places(self, path: str, start_bytes: int) -> dict[TensorKey, Place]:
        """The places in a slot that begins at `start_bytes`."""
        return {
            key: Place(path, start_bytes + self._offsets[key], num_elements, dtype)
            for key, (num_elements, dtype) in self._tensors.items()
        }

    def record(self, path: str, start_bytes: int) -> Place:
        return Place(path, start_bytes + self._record, RECORD_BYTES, torch.uint8)


@dataclass(frozen=True, slots=True)
class Peers:
    """The guardian, which keeps this rank's copies, and the ward, whose copies this rank keeps."""

    guardian: int
    ward: int
    packing: Packing
    """The packing of the ward's tensors."""
    slots: tuple[torch.Tensor, ...]


class Copies:
    """The copies of one rank in one mesh. `arena` is in host memory and holds nothing else."""

    def __init__(self, arena: Arena, tensors: Mapping[TensorKey, Extent]) -> None:
        self.arena = arena
        self.packing = Packing(tensors)
        self.slots = _slots(arena, self.packing)
        self.peers: Peers | None = None
        self._next = 0

    def send_to(self, guardian: int, *, ward: int, ward_tensors: Mapping[TensorKey, Extent]) -> None:
        """Call this once, before the first copy, on all ranks of the mesh. Each rank has one guardian and one ward."""
        packing = Packing(ward_tensors)
        self.peers = Peers(guardian, ward, packing, _slots(self.arena, packing))

    def take(self, tensors: Tensors, note: Note, world: World) -> None:
        """Copy the tensors, which belong to the note's update. Raises PeerLost. The tensors are never changed."""
        slot = self.slots[self._next]
        with self.packing.stamp(slot).writing(note), torch.no_grad():
            copied = self.packing.tensors(slot)
            torch._foreach_copy_([copied[key] for key in tensors], [tensor.detach() for tensor in tensors.values()])
        if self.peers is not None:
            self._exchange(slot, self.peers.slots[self._next], self.peers, world)
        self._next = (self._next + 1) % NUM_SLOTS

    def spoil(self) -> None:
        """Mark all slots as belonging to no update."""
        for slot in self.slots:
            self.packing.stamp(slot).spoil()
        if self.peers is not None:
            for slot in self.peers.slots:
                self.peers.packing.stamp(slot).spoil()

    def _exchange(self, sent: torch.Tensor, kept: torch.Tensor, peers: Peers, world: World) -> None:
        members = world.membership.members
        group = world.group(members)
        guardian, ward = members.index(peers.guardian), members.index(peers.ward)
        peers.packing.stamp(kept).spoil()
        for start in range(0, max(sent.numel(), kept.numel()), _PIECE_BYTES):
            outward = sent[start : start + _PIECE_BYTES].to(world.device)
            inward = kept[start : start + _PIECE_BYTES]
            landing = inward.to(world.device)
            operations = []
            if outward.numel():
                operations.append(dist.P2POp(dist.isend, outward, group=group, group_peer=guardian))
            if inward.numel():
                operations.append(dist.P2POp(dist.irecv, landing, group=group, group_peer=ward))
            with peers_needed(f"sending a copy to member {peers.guardian} and taking that of member {peers.ward}"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            if landing is not inward:
                inward.copy_(landing)


def slot_start_bytes(own: Packing, slot: int, *, ward: Packing | None = None) -> int:
    """Where a slot begins in the file of a rank's copies. The ward's slots come after the rank's own."""
    return slot * own.num_bytes if ward is None else NUM_SLOTS * own.num_bytes + slot * ward.num_bytes


def _slots(arena: Arena, packing: Packing) -> tuple[torch.Tensor, ...]:
    return tuple(arena.empty(packing.num_bytes, torch.uint8) for _ in range(NUM_SLOTS))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
