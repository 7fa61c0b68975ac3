"""The first phase of a reshard: the new layout is built, filled and checked beside the old one, which stays as it is.

Order: all members agree on what is asked and on the state it starts from; groups and tensors of the new layout, from
the epoch's cache or made and announced; each target rank plans its part alone, takes fresh memory and fetches its
regions; both ends are summed and compared. Invariants: nothing of the old layout is written; on a failure what was
taken for the new one is given back; all members call it alike, those without a part too, for they may be asked next;
memory that one lacks, or a transfer that fails it, fails all at the end of that step, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from tidegate.elastic import param_groups, stamp
from tidegate.elastic.by_host import ByHost
from tidegate.elastic.certificate import Certificate, RankSums, certify, sum_part
from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.held import Held
from tidegate.elastic.layout import Mesh
from tidegate.elastic.memory import ArenaReader
from tidegate.elastic.param_groups import GroupValues
from tidegate.elastic.peer_to_peer import PeerToPeer
from tidegate.elastic.plan import Part
from tidegate.elastic.report import ReshardReport, Stopwatch
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.shared_memory import SharedMemory
from tidegate.elastic.state import Progress
from tidegate.elastic.transport import Transport

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


class MembersDisagree(RuntimeError):
    """The members were not asked the same, or hold different states; nothing was changed."""


class StateLost(RuntimeError):
    """Not enough of the state survives its dead members: go back to the checkpoint."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one member says when a reshard begins, and what its holders say of the state."""

    name: str
    source: str
    target: str
    progress: Progress | None = None
    """None from a member that holds no part of the state."""
    num_updates: int | None = None
    """Of its tensors; None: of none, or an update was interrupted while it was applied."""
    groups: tuple[GroupValues, ...] = ()


_CLAIM = TypeAdapter(Claim)


@dataclass(slots=True)
class Prepared:
    """Both layouts, ready to switch or to give one back."""

    source: Held
    target: Held
    progress: Progress
    groups: tuple[GroupValues, ...]
    lost: tuple[int, ...]
    certificate: Certificate
    watch: Stopwatch

    def report(self) -> ReshardReport:
        seen = self.certificate
        return ReshardReport(
            source=self.source.mesh.layout,
            source_ranks=self.source.mesh.ranks,
            target=self.target.mesh.layout,
            target_ranks=self.target.mesh.ranks,
            num_updates=self.progress.num_updates,
            moved_bytes=seen.moved_bytes,
            minimum_bytes=seen.minimum_bytes,
            local_bytes=seen.local_bytes,
            certificate=seen.digest,
            seconds=dict(self.watch.seconds),
            lost=self.lost,
        )


class Preparing:
    """One reshard's first phase on this member."""

    def __init__(self, cache: EpochCache, settings: ElasticSettings, reader: ArenaReader, at: At) -> None:
        self._cache = cache
        self._settings = settings
        self._reader = reader
        self._at = at
        self._watch = Stopwatch()

    def run(self, name: str, source: Held, mesh: Mesh, progress: Progress) -> Prepared:
        self._at("asked")
        watch = self._watch
        lost = tuple(rank for rank in source.mesh.ranks if rank not in self._cache.world.membership.members)
        with watch.part("agreement"):
            progress, groups = self._agree(name, source, mesh, progress, lost)
        self._at("agreed")
        target = self._cache.introduce(mesh, beside=source.mesh, watch=watch)
        self._at("introduced")
        with watch.part("plan"):
            part = self._cache.part(source, target)
        self._at("planned")
        try:
            self._of_all("allocation", lambda: self._allocate(source, target))
            said = self._of_all("certificate", lambda: self._fill(part, source, target))
            with watch.part("certificate"):
                sums = {member: RankSums.decode(payload) for member, payload in said.items() if payload}
                certificate = certify(self._settings.certificate, sums, source.mesh, target.mesh)
            self._at("certified")
        except BaseException:
            target.release()
            raise
        if target.state is not None:
            target.state.stamp.set(progress.num_updates)
        return Prepared(source, target, progress, groups, lost, certificate, watch)

    def _agree(
        self, name: str, source: Held, target: Mesh, progress: Progress, lost: tuple[int, ...]
    ) -> tuple[Progress, tuple[GroupValues, ...]]:
        """Raises MembersDisagree, or StateLost where the ranks' tensors are of different updates."""
        claim = Claim(name, repr(source.mesh), repr(target))
        if source.state is not None:
            skeleton = source.state.skeleton
            claim = replace(
                claim,
                progress=progress,
                num_updates=source.state.stamp.num_updates,
                groups=param_groups.values_of(skeleton.optimizer),
            )
        world = self._cache.world
        claims = {
            member: _CLAIM.validate_json(payload)
            for member, payload in world.gather(world.membership.members, _CLAIM.dump_json(claim)).items()
        }
        asked = {member: (said.name, said.source, said.target) for member, said in claims.items()}
        if len(set(asked.values())) > 1:
            raise MembersDisagree(f"the members were asked for different reshards: {asked}; ask all the same")
        holders = {member: said for member, said in claims.items() if said.progress is not None}
        updates = {member: said.num_updates for member, said in holders.items()} | self._updates_of(lost, source)
        known = set(updates.values())
        if len(known) != 1 or None in known or not holders:
            raise StateLost(
                f"the ranks' tensors are of updates {updates} (None: unknown, or interrupted while it was applied); "
                "no whole state is left: go back to the checkpoint"
            )
        first = next(iter(holders.values()))
        assert first.progress is not None
        return first.progress, first.groups

    def _updates_of(self, lost: tuple[int, ...], source: Held) -> dict[int, int | None]:
        """Of dead ranks, as their memory says that outlived them."""
        found: dict[int, int | None] = {}
        for rank in lost:
            place = source.announcements[rank].stamp
            try:
                found[rank] = None if place is None else stamp.read(self._reader, place)
            except FileNotFoundError:
                found[rank] = None
        return found

    def _of_all(self, waiting: str, step: Callable[[], bytes]) -> dict[int, bytes]:
        """What the step gave each member; where it fails one, that one raises its error, the others ReshardAborted.

        `waiting`: the report's part that the wait for the others counts to."""
        failure, payload = None, b""
        try:
            payload = b"+" + step()
        except Exception as error:  # noqa: BLE001 - raised again, once the others know
            failure, payload = error, f"-{type(error).__name__}: {error}".encode()
        world = self._cache.world
        with self._watch.part(waiting):
            said = world.gather(world.membership.members, payload)
        if failure is not None:
            raise failure
        failures = {member: words[1:].decode() for member, words in said.items() if words.startswith(b"-")}
        if failures:
            raise ReshardAborted(f"the layout stays as it was: by members, what failed them: {failures}")
        return {member: words[1:] for member, words in said.items()}

    def _allocate(self, source: Held, target: Held) -> bytes:
        with self._watch.part("allocation"):
            if source.state is not None:
                source.state.skeleton.release_gradients()
            if target.state is not None:
                target.state.skeleton.materialise()
        self._at("allocated")
        return b""

    def _fill(self, part: Part | None, source: Held, target: Held) -> bytes:
        """This member's sums, of what it has sent and what it has received."""
        self._at("transferring")
        with self._watch.part("transfer"):
            if part is not None:
                self._transport(source).run(part, source.tensors(), target.tensors())
        self._at("transferred")
        with self._watch.part("certificate"):
            tensors = source.tensors(), target.tensors()
            sums = b"" if part is None else sum_part(self._settings.certificate, part, *tensors).encode()
        self._at("summed")
        return sums

    def _transport(self, source: Held) -> Transport:
        """By way of shared memory where the source's ranks have announced where their tensors lie."""
        world, hosts = self._cache.world, self._cache.hosts
        members = world.membership.members
        sent = PeerToPeer(world.group(members), members, hosts=hosts, memory_bytes=self._settings.staging_bytes)
        places = {rank: entry.places for rank, entry in source.announcements.items()}
        if not all(places.values()):
            return sent
        shared = SharedMemory(places, self._reader)
        return shared if len(set(hosts.values())) == 1 else ByHost(shared, sent, hosts)
