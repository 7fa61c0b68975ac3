"""The rollout's engines: those at work, those that come, those that leave, and those that stand by.

An engine comes in these steps, beside whatever the others do:
1. Its worker starts, or the worker that stands by on the slot takes the GPU.
2. The engine is built, or gets its memory back.
3. It loads the version that the other engines hold.
4. It is at work.

An engine leaves in these steps:
1. It gets no more requests.
2. It hands over its unfinished responses.
3. It frees its memory, and its worker stands by. Where it must not stand by, it ends.

`tidegate.runtime.standbys` says which workers stand by.

Invariants:
- An engine at work holds the version that was last loaded. [test_fleet: loads_the_version_that_came_meanwhile]
- A version that is gone fails no start where a newer one is known. [test_fleet: whose_version_is_dropped_meanwhile]
- An engine that leaves is asked to hand over until it holds no request. [test_moves: hands_its_unfinished]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from services.rollout.generation_state import EngineSlot
from tidegate.codec import decode_grants
from tidegate.config.job_config import JobConfig
from tidegate.ports.rpc import PeerRefused
from tidegate.runtime.crew import Crew, WorkerGone, WorkerRefused
from tidegate.runtime.snapshots import SnapshotUnavailable
from tidegate.runtime.standbys import StandbyRules, Standbys
from tidegate.types import Grant, Role
from tidegate.v1 import commands_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

HAND_OVER_S = 30.0
"""The time in which an engine hands over. Embedded engines take one step, some milliseconds; an SGLang server takes a
step and an HTTP call for each request. The responses of an engine that takes longer are generated again."""
_ABORT_AGAIN_S = 0.1
"""A call to generate that was on its way reaches the engine after the abort, so the abort is repeated."""
_NOT_LOADED = (SnapshotUnavailable, PeerRefused, WorkerRefused)
"""How the load of a version ends that is dropped meanwhile: its files are gone from the node, or for the worker."""


class Fleet:
    """See the module head. `incarnation` returns the job's present one."""

    def __init__(self, crew: Crew, config: JobConfig, *, incarnation: Callable[[], int]) -> None:
        self.slots: dict[str, EngineSlot] = {}
        """The engines at work, by GPU."""
        self._crew = crew
        self._config_json = config.to_json()
        may_come_back = bool(config.rollout.standby) or config.scheduler.moves_gpus
        rules = StandbyRules(
            Role.ROLLOUT,
            slots=config.slots(Role.ROLLOUT) if may_come_back else (),
            budget_bytes=config.rollout.standby_memory_mib << 20,
        )
        self._standbys = Standbys(crew, rules, self._put_to_rest)
        self._incarnation = incarnation
        self._wanted: types_pb2.Snapshot | None = None
        self._starting: dict[str, int | None] = {}
        """The GPUs of engines that come, with the version that they load."""
        self._leaving: dict[Grant, EngineSlot | None] = {}
        """Grants that are being released, with the engines that were at work on them."""
        self._log = structlog.get_logger("fleet")

    async def aclose(self) -> None:
        await self._standbys.aclose()

    def at_work(self, version: int) -> list[EngineSlot]:
        """The engines that hold the version."""
        slots = [self.slots[grant.gpu] for grant in self._crew.members if grant.gpu in self.slots]
        return [slot for slot in slots if slot.version == version]

    @property
    def versions(self) -> list[int]:
        """The versions that engines hold or load."""
        versions = [*(slot.version for slot in self.slots.values()), *self._starting.values()]
        return [version for version in versions if version is not None]

    @property
    def started(self) -> list[Grant]:
        """The members that have an engine, as far as this lead knows."""
        return [grant for grant in self._crew.members if grant.gpu not in self._starting]

    async def start(self, request: commands_pb2.ScaleUpRequest) -> None:
        """Bring these engines to work. Engines that are at work under these grants stay as they are."""
        transition = request.header.transition_id
        grants = [grant for grant in decode_grants(request.grants) if not self._is_at_work(grant)]
        self._starting |= dict.fromkeys((grant.gpu for grant in grants), None)
        try:
            await self._standbys.until_none_starts(grants)
            # Nobody knows how far a start came that an earlier lead began, or that was given up.
            members = {member.gpu for member in self._crew.members}
            if begun := [grant for grant in grants if grant.gpu in members]:
                await self._crew.stop(begun, transition=transition)
            await self._crew.start(grants, transition=transition)
            build = wire.WorkerCall(start_engine=wire.StartEngine(config_json=request.config_json))
            await self._crew.ask_all(dict.fromkeys(grants, build))
            given = request.weights if request.HasField("weights") else None
            version = await self._load_newest(grants, given)
            for grant in grants:
                self.slots[grant.gpu] = EngineSlot(grant, version)
        finally:
            self._standbys.note_taken(grants)
            for grant in grants:
                self._starting.pop(grant.gpu, None)

    async def load(self, snapshot: types_pb2.Snapshot, members: Sequence[Grant]) -> None:
        """Load a version on all engines at work. Those that come load it before they are at work.

        `members` are the component's as the scheduler knows them: a new lead finds them at work. Empty: all are."""
        self._wanted = snapshot
        for grant in self._crew.members:
            is_known = not members or grant in members
            if is_known and grant.gpu not in self._starting and grant not in self._leaving:
                self.slots.setdefault(grant.gpu, EngineSlot(grant))
        grants = [slot.grant for slot in self.slots.values() if slot.grant in self._crew.members]
        await self._crew.load(snapshot, grants)
        for grant in grants:
            if (slot := self.slots.get(grant.gpu)) is not None:
                slot.version = snapshot.version

    def leave(self, grants: Sequence[Grant]) -> list[EngineSlot]:
        """Begin a release. Returns the engines at work: from now on they get no request, and hand over."""
        slots = []
        for grant in grants:
            slot = self.slots.pop(grant.gpu) if self._is_at_work(grant) else None
            self._leaving[grant] = slot
            if slot is not None:
                slot.is_leaving = True
                slots.append(slot)
        return slots

    def is_leaving(self, grants: Sequence[Grant]) -> bool:
        return set(grants) <= self._leaving.keys()

    async def hand_over(self, slot: EngineSlot) -> None:
        """Take all requests out of an engine that leaves. Their calls answer with what it made of them."""
        abort = wire.WorkerCall(abort=wire.Abort())
        try:
            async with asyncio.timeout(HAND_OVER_S):
                while slot.calls:
                    slot.num_lost_tokens += (await self._crew.ask(slot.grant, abort)).aborted.num_lost_tokens
                    if slot.calls:
                        await asyncio.wait(slot.calls, timeout=_ABORT_AGAIN_S)
        except (TimeoutError, WorkerGone, WorkerRefused) as error:
            self._log.warning("engine did not hand over", gpu=slot.grant.gpu, error=str(error) or "too slow")

    async def let_go(self, grants: Sequence[Grant], *, transition: str) -> int:
        """Free these GPUs. Returns the bytes of device memory still in use. Engines that were at work stand by where
        they may; without a transition none does, because something is wrong with it."""
        able = [grant for grant in grants if transition and self._leaving.get(grant) is not None]
        try:
            held = await asyncio.gather(*(self._standbys.stand_down([grant]) for grant in able))
            held_bytes = {grant: num for grant, num in zip(able, held, strict=True) if num is not None}
            rest = [grant for grant in grants if grant not in held_bytes]
            stopped_bytes = await self._crew.stop(rest, transition=transition) if rest else 0
            return stopped_bytes + sum(held_bytes.values())
        finally:
            for grant in grants:
                self._leaving.pop(grant, None)

    def fill_standbys(self) -> None:
        """Have a worker stand by on each slot that the rollout may get and does not have."""
        taken = {grant.gpu for grant in (*self._crew.members, *self._leaving)} | self._starting.keys()
        self._standbys.fill(taken=taken)

    def _is_at_work(self, grant: Grant) -> bool:
        slot = self.slots.get(grant.gpu)
        return slot is not None and slot.grant == grant and grant in self._crew.members

    async def _load_newest(self, grants: Sequence[Grant], given: types_pb2.Snapshot | None) -> int | None:
        """Load the newest known version, and again while a newer one comes. Returns it, None where none is known."""
        loaded: types_pb2.Snapshot | None = None
        while True:
            wanted = self._newest(given)
            if wanted is None or (loaded is not None and _age(loaded) == _age(wanted)):
                return loaded.version if loaded is not None else None
            self._starting |= dict.fromkeys((grant.gpu for grant in grants), wanted.version)
            try:
                await self._crew.load(wanted, grants)
            except _NOT_LOADED as error:
                newest = self._newest(given)
                if newest is None or _age(newest) == _age(wanted):
                    raise
                self._log.info("loads a newer version", version=newest.version, error=str(error))
            else:
                loaded = wanted

    def _newest(self, given: types_pb2.Snapshot | None) -> types_pb2.Snapshot | None:
        known = [each for each in (given, self._wanted) if each is not None]
        return max((each for each in known if each.incarnation >= self._incarnation()), key=_age, default=None)

    async def _put_to_rest(self, grant: Grant) -> wire.Started:
        """Build the engine, if there is none, without the memory that it needs at work."""
        rest = wire.WorkerCall(start_engine=wire.StartEngine(config_json=self._config_json, stands_by=True))
        return (await self._crew.ask(grant, rest)).started


def _age(snapshot: types_pb2.Snapshot) -> tuple[int, int]:
    return snapshot.incarnation, snapshot.version
