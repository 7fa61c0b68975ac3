"""What a member can read of the ranks of a layout, living and dead: tensors, the copies of them, and of which update.

Its own tensors and copies are in this process, and so are the copies that it keeps of its ward; what a dead rank left
in its host's shared memory is read by every member of that host.
Invariant: slots are numbered alike by all: a rank's own copies first, then those that its guardian has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tidegate.elastic.model.memory import ArenaReader, Place
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.recovery import Origin, Version
from tidegate.elastic.state.copies import NUM_SLOTS, Packing, slot_start_bytes
from tidegate.elastic.state.held import Held
from tidegate.elastic.state.stamp import Note, read_at


@dataclass(frozen=True, slots=True)
class Sources:
    """Of the member `me`, in an epoch whose members are on these hosts."""

    held: Held
    me: int
    hosts: Mapping[int, str]
    reader: ArenaReader

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks of the layout that are in no epoch any more."""
        return tuple(rank for rank in self.held.mesh.ranks if rank not in self.hosts)

    def offers(self) -> Iterator[tuple[Version, Note]]:
        """All that this member can give, with what was noted there."""
        for rank, slot, note in (*self._own(), *self._left_on_host(), *self._ward()):
            if note is not None:
                yield Version(rank, note.progress.num_updates, slot), note

    def tensors(self, rank: int, slot: int | None) -> Tensors:
        """One of the offers."""
        state = self.held.state
        copies = None if state is None else state.copies
        if rank == self.me and state is not None and slot is None:
            return state.skeleton.tensors()
        if rank == self.me and copies is not None and slot is not None:
            return copies.packing.tensors(copies.slots[slot])
        if slot is not None and slot >= NUM_SLOTS and copies is not None and copies.peers is not None:
            return copies.peers.packing.tensors(copies.peers.slots[slot - NUM_SLOTS])
        places = self.places(rank, Origin(self.me, slot))
        return {key: self.reader.tensor_at(place) for key, place in places.items()}

    def places(self, rank: int, origin: Origin) -> Mapping[TensorKey, Place]:
        """Where members of the origin's host read it; none where it is not in shared memory."""
        of_rank = self.held.announcements[rank]
        if origin.slot is None:
            return of_rank.places
        packing = Packing(of_rank.tensors)
        if origin.slot < NUM_SLOTS:
            start = slot_start_bytes(packing, origin.slot)
            return packing.places(of_rank.copies, start) if of_rank.copies else {}
        guardian = self.held.announcements[origin.member]
        start = slot_start_bytes(Packing(guardian.tensors), origin.slot - NUM_SLOTS, ward=packing)
        return packing.places(guardian.copies, start) if guardian.copies else {}

    def _own(self) -> Iterator[tuple[int, int | None, Note | None]]:
        if self.held.state is None:
            return
        yield self.me, None, self.held.state.stamp.read()
        if (copies := self.held.state.copies) is not None:
            for index, slot in enumerate(copies.slots):
                yield self.me, index, copies.packing.stamp(slot).read()

    def _ward(self) -> Iterator[tuple[int, int | None, Note | None]]:
        copies = None if self.held.state is None else self.held.state.copies
        if copies is not None and (peers := copies.peers) is not None and peers.ward in self.lost:
            for index, slot in enumerate(peers.slots):
                yield peers.ward, NUM_SLOTS + index, peers.packing.stamp(slot).read()

    def _left_on_host(self) -> Iterator[tuple[int, int | None, Note | None]]:
        for rank in self.lost:
            entry = self.held.announcements[rank]
            if entry.host != self.hosts[self.me]:
                continue
            if entry.record is not None:
                yield rank, None, read_at(self.reader, entry.record)
            if entry.copies:
                packing = Packing(entry.tensors)
                for slot in range(NUM_SLOTS):
                    place = packing.record(entry.copies, slot_start_bytes(packing, slot))
                    yield rank, slot, read_at(self.reader, place)
