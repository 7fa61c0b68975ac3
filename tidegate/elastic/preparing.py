"""The first phase of a reshard: the new layout is built, filled and checked beside the old one, which stays as it is.

Order: all members agree on what is asked and on the state it starts from; groups and tensors of the new layout, from
the epoch's cache or made and announced; each target rank plans its part alone, takes fresh memory and fetches its
regions; both ends are summed and compared. Invariants: nothing of the old layout is written; on a failure what was
taken for the new one is given back; all members call it alike, those without a part too, for they may be asked next;
memory that one lacks, or reading that fails it, fails all at the end of that step, so that nobody waits for it; who
was to be sent something by a member that fails waits for it as for a dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tidegate.elastic.agreement import Agreement, agree
from tidegate.elastic.carry.by_host import ByHost
from tidegate.elastic.carry.peer_to_peer import PeerToPeer
from tidegate.elastic.carry.shared_memory import SharedMemory
from tidegate.elastic.carry.transport import StandIns, Transport
from tidegate.elastic.check.certificate import Certificate, certify, decode_all, encode_all, sum_part
from tidegate.elastic.epoch.together import MemberFailed, of_all
from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.model import param_groups
from tidegate.elastic.model.memory import ArenaReader
from tidegate.elastic.model.tensors import Tensors
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.plan import Part
from tidegate.elastic.plan.recovery import Origin
from tidegate.elastic.report import ReshardReport, Stopwatch
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state.copies import NUM_SLOTS
from tidegate.elastic.state.held import Held
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.sources import Sources
from tidegate.elastic.state.stamp import Note

At = Callable[[str], None]
"""Called as each named point is reached; tests end processes there."""
POINTS = (
    "asked",
    "agreed",
    "introduced",
    "planned",
    "allocated",
    "transferring",
    "transferred",
    "summed",
    "certified",
    "copied",
    "voted",
    "decided",
    "switched",
    "all_switched",
    "released",
)
"""All the points of a reshard in their order; those from `voted` on are of the second phase."""


def nowhere(point: str) -> None:
    """Where nobody waits for a point."""


class ReshardAborted(RuntimeError):
    """The layout is as it was; the message says whose failure it was."""


@dataclass(slots=True)
class Prepared:
    """Both layouts, ready to switch or to give one back."""

    source: Held
    target: Held
    agreement: Agreement
    lost: tuple[int, ...]
    certificate: Certificate
    watch: Stopwatch

    def report(self) -> ReshardReport:
        seen = self.certificate
        progress, newest = self.agreement.note.progress, self.agreement.newest
        return ReshardReport(
            source=self.source.mesh.layout,
            source_ranks=self.source.mesh.ranks,
            target=self.target.mesh.layout,
            target_ranks=self.target.mesh.ranks,
            num_updates=progress.num_updates,
            moved_bytes=seen.moved_bytes,
            minimum_bytes=seen.minimum_bytes,
            local_bytes=seen.local_bytes,
            certificate=seen.digest,
            seconds=dict(self.watch.seconds),
            lost=self.lost,
            restored=_restored(self.agreement.origins),
            redone_updates=newest.num_updates - progress.num_updates,
            redone_samples=newest.num_samples - progress.num_samples,
        )


@dataclass(frozen=True, slots=True)
class Duty:
    """What this member does in the transfer."""

    part: Part
    own: Tensors
    stand_ins: StandIns
    """Of dead ranks that it can read."""
    transport: Transport


class Preparing:
    """One reshard's first phase on this member."""

    def __init__(self, cache: EpochCache, settings: ElasticSettings, reader: ArenaReader, at: At) -> None:
        self._cache = cache
        self._settings = settings
        self._reader = reader
        self._at = at
        self._watch = Stopwatch()

    def run(self, name: str, source: Held, mesh: Mesh, progress: Progress) -> Prepared:
        try:
            return self._run(name, source, mesh, progress)
        except MemberFailed as error:
            raise ReshardAborted(f"the layout stays as it was: {error}") from error

    def _run(self, name: str, source: Held, mesh: Mesh, progress: Progress) -> Prepared:
        self._at("asked")
        watch = self._watch
        world, hosts = self._cache.world, self._cache.hosts
        sources = Sources(source, world.me, hosts, self._reader)
        with watch.part("allocation"):
            self._make_room(source, mesh, progress)
        with watch.part("agreement"):
            agreement = agree(name, sources, mesh, progress, world)
        self._at("agreed")
        in_use = source.mesh if source.epoch == world.membership.epoch else None
        target = self._cache.introduce(mesh, beside=in_use, watch=watch)
        self._at("introduced")
        with watch.part("plan"):
            duty = self._duty(sources, agreement.origins, target)
        self._at("planned")
        try:
            self._of_all("allocation", lambda: self._allocate(target))
            said = self._of_all("certificate", lambda: self._fill(duty, target))
            with watch.part("certificate"):
                sums = {rank: of for payload in said.values() for rank, of in decode_all(payload).items()}
                certificate = certify(self._settings.certificate, sums, source.mesh, target.mesh)
            self._at("certified")
            self._of_all("copies", lambda: self._copy(target, agreement.note))
            self._at("copied")
        except BaseException:
            target.release()
            raise
        return Prepared(source, target, agreement, sources.lost, certificate, watch)

    def _duty(self, sources: Sources, origins: Mapping[int, Origin], target: Held) -> Duty:
        me, hosts = self._cache.world.me, self._cache.hosts
        read_on = {rank: hosts[origin.member] for rank, origin in origins.items()}
        held = sources.held
        part = self._cache.part(held, target, hosts | read_on)
        gone = [rank for rank in sources.lost if origins[rank].member == me]
        parts = self._cache.parts_of(held, target, hosts | read_on, gone) if gone else {}
        device = self._cache.world.device
        own = {} if me not in origins else _on(device, sources.tensors(me, origins[me].slot))
        stand_ins = {rank: (parts[rank], _on(device, sources.tensors(rank, origins[rank].slot))) for rank in gone}
        return Duty(part or Part(me, (), (), (), (), ()), own, stand_ins, self._transport(sources, origins, read_on))

    def _of_all(self, waiting: str, step: Callable[[], bytes]) -> dict[int, bytes]:
        return of_all(self._cache.world, step, waiting=self._watch.part(waiting))

    def _make_room(self, source: Held, mesh: Mesh, progress: Progress) -> None:
        """Only the two layouts keep memory, without gradients; and what the caller changed since the last update, in
        parameter groups say, is noted."""
        self._cache.make_room(source, mesh)
        if (state := source.state) is not None:
            state.skeleton.release_gradients()
            noted = state.stamp.read()
            # Who lost a peer in an update may have applied it and not counted it.
            if noted is not None and noted.progress.num_updates == progress.num_updates:
                state.stamp.renote(Note(progress, param_groups.values_of(state.skeleton.optimizer)))

    def _allocate(self, target: Held) -> bytes:
        with self._watch.part("allocation"):
            if target.state is not None:
                target.state.materialise()
        self._at("allocated")
        return b""

    def _fill(self, duty: Duty, target: Held) -> bytes:
        """This member's sums, of what it has sent and what it has received, and those of the ranks it stands in for."""
        self._at("transferring")
        part, tensors = duty.part, target.tensors()
        with self._watch.part("transfer"):
            duty.transport.run(part, duty.own, tensors, stand_ins=duty.stand_ins)
        self._at("transferred")
        level = self._settings.certificate
        with self._watch.part("certificate"):
            sums = {rank: sum_part(level, other, left, {}) for rank, (other, left) in duty.stand_ins.items()}
            if part.held or part.wanted:
                sums[part.rank] = sum_part(level, part, duty.own, tensors)
        self._at("summed")
        return encode_all(sums)

    def _copy(self, target: Held, note: Note) -> bytes:
        """From here on the new layout's state survives what the settings say."""
        if (state := target.state) is not None:
            with self._watch.part("copies"):
                state.stamp.set(note)
                if state.copies is not None:
                    state.copies.take(target.tensors(), note, self._cache.world)
        return b""

    def _transport(self, sources: Sources, origins: Mapping[int, Origin], read_on: dict[int, str]) -> Transport:
        """By way of shared memory where all that the source's ranks give is in it."""
        world, hosts = self._cache.world, self._cache.hosts | read_on
        members = world.membership.members
        sent = PeerToPeer(
            world.group(members),
            members,
            served_by={rank: origins[rank].member for rank in sources.lost},
            hosts=hosts,
            memory_bytes=self._settings.staging_bytes,
        )
        places = {rank: sources.places(rank, origin) for rank, origin in origins.items()}
        if not all(places.values()):
            return sent
        shared = SharedMemory(places, self._reader)
        return shared if len(set(hosts.values())) == 1 else ByHost(shared, sent, hosts)


def _on(device: torch.device, tensors: Tensors) -> Tensors:
    """Copies are in the host's memory."""
    return {key: tensor.to(device) for key, tensor in tensors.items()}


def _restored(origins: Mapping[int, Origin]) -> dict[int, str]:
    """How the state of those ranks survived that did not keep it as they had it."""
    found = {}
    for rank, (member, slot) in origins.items():
        if slot is not None:
            found[rank] = "its own copy" if slot < NUM_SLOTS else f"the copy that member {member} kept"
        elif member != rank:
            found[rank] = "the memory that its node kept"
    return found
