"""The first phase of a reshard builds, fills and checks the new layout beside the old one, which stays as it is.

Order:
1. All members agree on the request and on the state from which it starts.
2. Groups and tensors of the new layout come from the epoch's cache, or are built and announced.
3. Each rank plans its own part alone.
4. Each target rank takes fresh memory and fetches its regions.
5. Both ends are summed, and the sums are compared: here, or after the switch (`late_proof`).

Where portions are carried, the old layout reduces their gradients after step 1 (`carried_update`).

All members call it with the same arguments. Members without a part call it too, because a later reshard may need them.

Invariants:
- Nothing of the old layout is written but uncommitted gradients. [test_transports: the_source_is_untouched]
- After a failure the memory that the new layout took is given back.
  [test_refusals: a_failure_of_one_member_before_the_decision]
- If one member lacks memory or cannot read, the step fails on all members at its end, so that nobody waits for it.
  [test_refusals: a_failure_of_one_member_before_the_decision]

A member that expects bytes from a failing member waits for it as for a dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch

from tidegate.elastic.agreement import Agreement, PortionSizes, agree
from tidegate.elastic.carried_update import CarriedUpdate
from tidegate.elastic.carry.device_memory import DeviceMemory
from tidegate.elastic.carry.hybrid import HybridTransport
from tidegate.elastic.carry.peer_to_peer import PeerToPeer
from tidegate.elastic.carry.shared_memory import SharedMemory
from tidegate.elastic.carry.transport import StandIns, Transport
from tidegate.elastic.check.certificate import Certificate, certify, decode_all, encode_all, sum_part
from tidegate.elastic.check.level import Level
from tidegate.elastic.epoch.backends import Backend
from tidegate.elastic.epoch.joint_step import MemberFailed, run_on_all
from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.model.memory import ArenaReader
from tidegate.elastic.model.tensors import Tensors
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Part
from tidegate.elastic.plan.recovery import NUM_SLOTS, Origin
from tidegate.elastic.report import ReshardReport, Stopwatch
from tidegate.elastic.settings import CopyTo, ElasticSettings
from tidegate.elastic.state.host_copy import KEPT_SLOT
from tidegate.elastic.state.location import StateLocation
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.sources import Sources
from tidegate.elastic.state.stamp import Note

OnPoint = Callable[[str], None]
"""The trainer calls this as it reaches each named point. Tests end processes there."""
POINTS = (
    "requested",
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
"""All points of a reshard in their order. The points from `voted` on belong to the second phase."""

CARRIED_KINDS = frozenset({StateKind.GRADIENT})
"""The kinds that are compared before the switch always: the next portion changes them."""


def ignore_point(point: str) -> None:
    """The default: nobody waits for a point."""


class ReshardAborted(RuntimeError):
    """The layout is as it was. The message names the member that failed."""


@dataclass(slots=True)
class PreparedReshard:
    """Both layouts: the job can switch to the new one, or give it back."""

    name: str
    source: StateLocation
    target: StateLocation
    agreement: Agreement
    duty: Duty
    lost: tuple[int, ...]
    certificate: Certificate
    is_late: bool
    """Whether the state is summed and compared after the switch. Then the certificate has no digest."""
    watch: Stopwatch
    was_built: bool
    """Whether the target's groups and tensors were there before."""
    carried: CarriedUpdate

    def report(self) -> ReshardReport:
        certificate = self.certificate
        progress, newest = self.agreement.note.progress, self.agreement.newest
        return ReshardReport(
            source=self.source.mesh.layout,
            source_ranks=self.source.mesh.ranks,
            target=self.target.mesh.layout,
            target_ranks=self.target.mesh.ranks,
            num_updates=progress.num_updates,
            moved_bytes=certificate.moved_bytes,
            minimum_bytes=certificate.minimum_bytes,
            local_bytes=certificate.local_bytes,
            certificate=certificate.digest,
            seconds=dict(self.watch.seconds),
            lost=self.lost,
            restored=_restored(self.agreement.origins),
            was_built=self.was_built,
            num_portions=len(self.carried.portions),
            redone_updates=newest.num_updates - progress.num_updates,
            redone_samples=newest.num_samples - progress.num_samples,
        )


@dataclass(frozen=True, slots=True)
class Duty:
    """This member's part in the transfer."""

    part: Part
    own: Tensors
    stand_ins: StandIns
    """The parts and tensors of dead ranks that this member can read."""
    transport: Transport
    is_in_place: bool
    """Whether the target's tensors are the source's: a suspended layout in shared memory is continued as it is."""


class Preparation:
    """The first phase of one reshard on this member."""

    def __init__(
        self,
        cache: EpochCache,
        settings: ElasticSettings,
        reader: ArenaReader,
        on_point: OnPoint,
        carried: CarriedUpdate,
    ) -> None:
        self._cache = cache
        self._carried = carried
        self._settings = settings
        self._reader = reader
        self._on_point = on_point
        self._watch = Stopwatch()

    def run(
        self, name: str, source: StateLocation, mesh: Mesh, progress: Progress, *, may_be_late: bool
    ) -> PreparedReshard:
        """`may_be_late`: whether the state may be compared after the switch, where the settings ask for it."""
        try:
            return self._run(name, source, mesh, progress, may_be_late=may_be_late)
        except MemberFailed as error:
            raise ReshardAborted(f"the layout stays as it was: {error}") from error

    def _run(
        self, name: str, source: StateLocation, mesh: Mesh, progress: Progress, *, may_be_late: bool
    ) -> PreparedReshard:
        self._on_point("requested")
        watch = self._watch
        world, hosts = self._cache.world, self._cache.hosts
        sources = Sources(source, world.me, hosts, self._reader)
        with watch.part("allocation"):
            self._make_room(source, mesh, progress)
        with watch.part("agreement"):
            agreement = agree(name, sources, mesh, progress, world, portions=self._portion_sizes())
        self._on_point("agreed")
        self._carried.reduce(watch)
        in_use = source.mesh if source.epoch == world.membership.epoch else None
        was_built = self._cache.knows(mesh)
        target = self._cache.introduce(mesh, beside=in_use, watch=watch)
        self._on_point("introduced")
        with watch.part("plan"):
            duty = self._duty(sources, agreement.origins, target)
        self._on_point("planned")
        is_late = may_be_late and self._can_be_late(source, target)
        kinds = CARRIED_KINDS if is_late else frozenset(StateKind)
        try:
            payloads = self._filled(duty, target, kinds)
            with watch.part("certificate"):
                sums = {rank: of for payload in payloads.values() for rank, of in decode_all(payload).items()}
                certificate = certify(self._settings.certificate, sums, source.mesh, target.mesh)
                if is_late:
                    certificate = replace(certificate, digest="")
            self._on_point("certified")
            if self._settings.copies is CopyTo.NOWHERE:
                self._copy(target, agreement.note)
            else:
                self._run_on_all("copies", lambda: self._copy(target, agreement.note))
            self._on_point("copied")
        except BaseException:  # an interrupt too must not keep the target's buffers
            target.give_back(source)
            self._carried.give_back()
            raise
        return PreparedReshard(
            name, source, target, agreement, duty, sources.lost, certificate, is_late, watch, was_built, self._carried
        )

    def _can_be_late(self, source: StateLocation, target: StateLocation) -> bool:
        """All members answer alike. The head of `late_proof` has the reasons."""
        settings = self._settings
        asked = settings.proves_late and settings.keeps_last and settings.certificate is not Level.OFF
        # Copies of both layouts beside gradients would be memory that nothing else takes.
        asked = asked and settings.copies is CopyTo.NOWHERE
        is_shared = all(rank.places for of in (source, target) for rank in of.announcements.values())
        stays = source.epoch == target.epoch and set(source.mesh.ranks) <= set(target.mesh.ranks)
        return asked and is_shared and stays

    def _portion_sizes(self) -> PortionSizes:
        carried, held = self._carried.portions, self._carried.held
        return PortionSizes(
            tuple(portion.num_samples for portion in carried), tuple(portion.num_samples for portion in held)
        )

    def _duty(self, sources: Sources, origins: Mapping[int, Origin], target: StateLocation) -> Duty:
        me, hosts = self._cache.world.me, self._cache.hosts
        read_on = {rank: hosts[origin.member] for rank, origin in origins.items()}
        location = sources.location
        part = self._cache.part(location, target, hosts | read_on)
        served = [rank for rank in sources.lost if origins[rank].member == me]
        parts = self._cache.parts_of(location, target, hosts | read_on, served) if served else {}
        transport = self._transport(sources, origins, read_on)
        # Only a transport that sends needs the source on the device.
        device = torch.device("cpu") if isinstance(transport, SharedMemory) else self._cache.world.device
        tensors = {} if me not in origins else sources.tensors(me, origins[me].slot)
        own = _on(device, {**tensors, **self._carried.source_tensors()})
        stand_ins = {rank: (parts[rank], _on(device, sources.tensors(rank, origins[rank].slot))) for rank in served}
        is_in_place = target.state is not None and target.state is location.state and origins[me].slot is None
        part = self._carried.in_part(part or Part(me, (), (), (), (), ()))
        return Duty(part, own, stand_ins, transport, is_in_place=is_in_place)

    def _run_on_all(self, waiting: str, step: Callable[[], bytes]) -> dict[int, bytes]:
        return run_on_all(self._cache.world, step, waiting=self._watch.part(waiting))

    def _make_room(self, source: StateLocation, mesh: Mesh, progress: Progress) -> None:
        """Keep memory for the two layouts only, without gradients. Those that are carried stay until they are reduced.

        Also note what the caller changed since the last update, for example in the parameter groups.
        """
        self._cache.make_room(source, mesh)
        if (state := source.state) is not None:
            if not self._carried.portions:
                state.skeleton.release_gradients()
            state.renote(progress)

    def _filled(self, duty: Duty, target: StateLocation, kinds: AbstractSet[StateKind]) -> dict[int, bytes]:
        """All members' sums, once they have filled the new layout."""
        if isinstance(duty.transport, SharedMemory):
            return self._run_on_all("certificate", lambda: self._allocate(target) + self._fill(duty, target, kinds))
        # Members that send would wait for one that has no memory to receive.
        self._run_on_all("allocation", lambda: self._allocate(target))
        if isinstance(carrier := duty.transport, DeviceMemory):
            self._map(carrier, duty)
        return self._run_on_all("certificate", lambda: self._fill(duty, target, kinds))

    def _map(self, carrier: DeviceMemory, duty: Duty) -> None:
        """All members map what they receive from, or none does."""

        def announce() -> bytes:
            with self._watch.part("transfer"):
                return carrier.announce(duty.part, duty.own)

        def map_all() -> bytes:
            with self._watch.part("transfer"):
                return carrier.open(duty.part, announced)

        announced = self._run_on_all("transfer", announce)
        carrier.settle(self._run_on_all("transfer", map_all))

    def _allocate(self, target: StateLocation) -> bytes:
        with self._watch.part("allocation"):
            if target.state is not None:
                target.state.materialise()
            self._carried.allocate(target)
        self._on_point("allocated")
        return b""

    def _fill(self, duty: Duty, target: StateLocation, kinds: AbstractSet[StateKind]) -> bytes:
        """This member's sums, of these kinds, of the regions that it sent and received, and of the ranks that it
        replaces."""
        self._on_point("transferring")
        part, tensors = duty.part, {**target.tensors(), **self._carried.target_tensors()}
        with self._watch.part("transfer"):
            if not duty.is_in_place:
                duty.transport.run(part, duty.own, tensors, stand_ins=duty.stand_ins)
        self._on_point("transferred")
        level = self._settings.certificate
        with self._watch.part("certificate"):
            sums = {
                rank: sum_part(level, other, tensors, {}, kinds=kinds)
                for rank, (other, tensors) in duty.stand_ins.items()
            }
            if part.source_holdings or part.target_holdings:
                sums[part.rank] = sum_part(level, part, duty.own, tensors, kinds=kinds)
        self._on_point("summed")
        return encode_all(sums)

    def _copy(self, target: StateLocation, note: Note) -> bytes:
        """Copy the new layout's state. From here on it survives the failures that the settings name."""
        if (state := target.state) is not None:
            with self._watch.part("copies"):
                state.stamp.set(note)
                if state.copies is not None:
                    state.copies.take(target.tensors(), note, self._cache.world)
        return b""

    def _transport(self, sources: Sources, origins: Mapping[int, Origin], read_on: dict[int, str]) -> Transport:
        """Use shared memory where all tensors that the source's ranks provide are in it."""
        world, hosts = self._cache.world, self._cache.hosts | read_on
        members = world.membership.members
        sent = PeerToPeer(
            world.group(members),
            members,
            served_by={rank: origins[rank].member for rank in sources.lost},
            hosts=hosts,
            memory_bytes=self._settings.staging_bytes,
        )
        places = {
            rank: {**sources.places(rank, origin), **self._carried.places(rank)} for rank, origin in origins.items()
        }
        if not all(places.values()):
            shares = world.device.type == "cuda" and world.backend is Backend.STAGED and not sources.lost
            return DeviceMemory(sent) if shares and len(set(hosts.values())) == 1 else sent
        shared = SharedMemory(places, self._reader)
        return shared if len(set(hosts.values())) == 1 else HybridTransport(shared, sent, hosts)


def _on(device: torch.device, tensors: Tensors) -> Tensors:
    """The tensors on the device. Copies are in host memory."""
    return {key: tensor.to(device) for key, tensor in tensors.items()}


def _restored(origins: Mapping[int, Origin]) -> dict[int, str]:
    """By rank whose own tensors were not used: how its state survived."""
    found = {}
    for rank, (member, slot) in origins.items():
        if slot == KEPT_SLOT and member == rank:
            continue
        if slot is not None and slot != KEPT_SLOT:
            found[rank] = "its own copy" if slot < NUM_SLOTS else f"the copy that member {member} kept"
        elif member != rank:
            found[rank] = "the memory that its node kept"
    return found
