"""The tensors that a member can read of a layout's ranks, living and dead: the tensors themselves, copies, and their
updates.

- Its own tensors and copies are in this process, and so are the copies that it keeps of its ward.
- While the job is suspended its tensors may be in a copy of their own.
- Every member of a host can read the files that a dead rank left in the host's shared memory.

Invariant: all members number slots alike: first a rank's own copies, then those that its guardian keeps, then
the copy of a suspended rank.
[test_deaths: training_continues_after_a_death]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tidegate.elastic.model.memory import ArenaReader, Place
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.recovery import NUM_SLOTS, Origin, Version
from tidegate.elastic.state.copies import Packing, slot_start_bytes
from tidegate.elastic.state.host_copy import KEPT_SLOT
from tidegate.elastic.state.location import StateLocation
from tidegate.elastic.state.stamp import Note, read_at


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of member `me`, in an epoch whose members are on these hosts."""

    location: StateLocation
    me: int
    hosts: Mapping[int, str]
    reader: ArenaReader

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks of the layout that are not members of the epoch."""
        return tuple(rank for rank in self.location.mesh.ranks if rank not in self.hosts)

    def offers(self) -> Iterator[tuple[Version, Note]]:
        """All that this member can provide, with the note of each."""
        for rank, slot, note in (*self._own(), *self._left_on_host(), *self._ward()):
            if note is not None:
                yield Version(rank, note.progress.num_updates, slot), note

    def tensors(self, rank: int, slot: int | None) -> Tensors:
        """The tensors of one of the offers."""
        state = self.location.state
        copies = None if state is None else state.copies
        if rank == self.me and state is not None and slot is None:
            return state.skeleton.tensors()
        if rank == self.me and state is not None and state.kept is not None and slot == KEPT_SLOT:
            return state.kept.tensors
        if rank == self.me and copies is not None and slot is not None:
            return copies.packing.tensors(copies.slots[slot])
        if slot is not None and NUM_SLOTS <= slot < KEPT_SLOT and copies is not None and copies.peers is not None:
            return copies.peers.packing.tensors(copies.peers.slots[slot - NUM_SLOTS])
        places = self.places(rank, Origin(self.me, slot))
        return {key: self.reader.tensor_at(place) for key, place in places.items()}

    def places(self, rank: int, origin: Origin) -> Mapping[TensorKey, Place]:
        """Where members of the origin's host read it; none where it is not in shared memory."""
        of_rank = self.location.announcements[rank]
        if origin.slot is None:
            return of_rank.places
        packing = Packing(of_rank.tensors)
        if origin.slot == KEPT_SLOT:
            return packing.places(of_rank.kept, 0) if of_rank.kept else {}
        if origin.slot < NUM_SLOTS:
            start = slot_start_bytes(packing, origin.slot)
            return packing.places(of_rank.copies, start) if of_rank.copies else {}
        guardian = self.location.announcements[origin.member]
        start = slot_start_bytes(Packing(guardian.tensors), origin.slot - NUM_SLOTS, ward=packing)
        return packing.places(guardian.copies, start) if guardian.copies else {}

    def _own(self) -> Iterator[tuple[int, int | None, Note | None]]:
        if self.location.state is None:
            return
        yield self.me, None, self.location.state.stamp.read()
        if (kept := self.location.state.kept) is not None:
            yield self.me, KEPT_SLOT, kept.note()
        if (copies := self.location.state.copies) is not None:
            for index, slot in enumerate(copies.slots):
                yield self.me, index, copies.packing.stamp(slot).read()

    def _ward(self) -> Iterator[tuple[int, int | None, Note | None]]:
        copies = None if self.location.state is None else self.location.state.copies
        if copies is not None and (peers := copies.peers) is not None and peers.ward in self.lost:
            for index, slot in enumerate(peers.slots):
                yield peers.ward, NUM_SLOTS + index, peers.packing.stamp(slot).read()

    def _left_on_host(self) -> Iterator[tuple[int, int | None, Note | None]]:
        for rank in self.lost:
            entry = self.location.announcements[rank]
            if entry.host != self.hosts[self.me]:
                continue
            if entry.record is not None:
                yield rank, None, read_at(self.reader, entry.record)
            if entry.kept:
                place = Packing(entry.tensors).record(entry.kept, 0)
                yield rank, KEPT_SLOT, read_at(self.reader, place)
            if entry.copies:
                packing = Packing(entry.tensors)
                for slot in range(NUM_SLOTS):
                    place = packing.record(entry.copies, slot_start_bytes(packing, slot))
                    yield rank, slot, read_at(self.reader, place)
