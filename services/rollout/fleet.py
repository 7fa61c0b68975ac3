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

A worker that stands by has no token: it holds no gate and owns no slot's time.

Invariants:
- An engine at work holds the version that was last loaded. [test_fleet: loads_the_version_that_came_meanwhile]
- An engine that leaves is asked to hand over until it holds no request. [test_moves: hands_its_unfinished]
- A standby that exceeds its memory budget is ended, and its slot starts cold. [test_fleet: takes_too_much_memory]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from services.rollout.generation_state import EngineSlot
from tidegate.codec import decode_grants
from tidegate.config.job_config import JobConfig
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import Crew, WorkerGone, WorkerRefused
from tidegate.types import NO_TOKEN, GpuId, Grant, Role
from tidegate.v1 import commands_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

HAND_OVER_S = 30.0
"""The time in which an engine hands over. Embedded engines take one step, some milliseconds; an SGLang server takes a
step and an HTTP call for each request. The responses of an engine that takes longer are generated again."""
_ABORT_AGAIN_S = 0.1
"""A call to generate that was on its way reaches the engine after the abort, so the abort is repeated."""


class Fleet:
    """See the module head. `incarnation` returns the job's present one."""

    def __init__(self, crew: Crew, config: JobConfig, *, incarnation: Callable[[], int]) -> None:
        self.slots: dict[str, EngineSlot] = {}
        """The engines at work, by GPU."""
        self._crew = crew
        self._config_json = config.to_json()
        may_come_back = bool(config.rollout.standby) or config.scheduler.moves_gpus
        self._standby_slots = config.slots(Role.ROLLOUT) if may_come_back else ()
        self._standby_bytes = config.rollout.standby_memory_mib << 20
        self._incarnation = incarnation
        self._wanted: types_pb2.Snapshot | None = None
        self._starting: dict[str, int | None] = {}
        """The GPUs of engines that come, with the version that they load."""
        self._leaving: dict[Grant, EngineSlot | None] = {}
        """Grants that are being released, with the engines that were at work on them."""
        self._standing_by: dict[str, asyncio.Task[None]] = {}
        """The starts of workers that will stand by."""
        self._being_built = ""
        """The GPU of the one among them that is under way."""
        self._built: set[str] = set()
        self._too_large: set[str] = set()
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("fleet")

    async def aclose(self) -> None:
        for task in list(self._standing_by.values()):
            await end_task(task)

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
            await self._until_no_standby_begins(grants)
            # Nobody knows how far their start came, which an earlier lead began.
            if begun := [grant for grant in grants if grant in self._crew.members]:
                await self._crew.stop(begun, transition=transition)
            await self._crew.start(grants, transition=transition)
            build = wire.WorkerCall(start_engine=wire.StartEngine(config_json=request.config_json))
            await self._crew.ask_all(dict.fromkeys(grants, build))
            given = request.weights if request.HasField("weights") else None
            version = await self._load_newest(grants, given)
            for grant in grants:
                self.slots[grant.gpu] = EngineSlot(grant, version)
        finally:
            for grant in grants:
                self._starting.pop(grant.gpu, None)
                self._built.discard(grant.gpu)

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
                    await self._crew.ask(slot.grant, abort)
                    if slot.calls:
                        await asyncio.wait(slot.calls, timeout=_ABORT_AGAIN_S)
        except (TimeoutError, WorkerGone, WorkerRefused) as error:
            self._log.warning("engine did not hand over", gpu=slot.grant.gpu, error=str(error) or "too slow")

    async def let_go(self, grants: Sequence[Grant], *, transition: str) -> int:
        """Free these GPUs. Returns the bytes of device memory still in use. Engines that were at work stand by where
        they may; without a transition none does, because something is wrong with it."""
        able = [grant for grant in grants if transition and self._leaving.get(grant) is not None]
        try:
            outcomes = await asyncio.gather(*(self._stand_down(grant) for grant in able))
            stood_down = {grant for grant, has in zip(able, outcomes, strict=True) if has}
            rest = [grant for grant in grants if grant not in stood_down]
            return await self._crew.stop(rest, transition=transition) if rest else 0
        finally:
            for grant in grants:
                self._leaving.pop(grant, None)

    def fill_standbys(self) -> None:
        """Have a worker stand by on each slot that the rollout may get and does not have. One starts at a time."""
        taken = {grant.gpu for grant in (*self._crew.members, *self._leaving)} | self._starting.keys()
        standing_by = {grant.gpu for grant in self._crew.standbys} & self._built
        for gpu in self._standby_slots:
            if gpu not in taken | standing_by | self._too_large | self._standing_by.keys():
                task = asyncio.create_task(self._stand_by(gpu), name=f"stand by on {gpu}")
                self._standing_by[gpu] = task
                task.add_done_callback(partial(self._forget_begun, gpu))

    def _forget_begun(self, gpu: str, _: asyncio.Task[None]) -> None:
        del self._standing_by[gpu]

    def _is_at_work(self, grant: Grant) -> bool:
        slot = self.slots.get(grant.gpu)
        return slot is not None and slot.grant == grant and grant in self._crew.members

    async def _load_newest(self, grants: Sequence[Grant], given: types_pb2.Snapshot | None) -> int | None:
        """Load the newest known version, and again while a newer one comes. Returns it, None where none is known."""
        loaded: types_pb2.Snapshot | None = None
        while True:
            known = [each for each in (given, self._wanted) if each is not None]
            present = [each for each in known if each.incarnation >= self._incarnation()]
            wanted = max(present, key=_age, default=None)
            if wanted is None or (loaded is not None and _age(loaded) == _age(wanted)):
                return loaded.version if loaded is not None else None
            self._starting |= dict.fromkeys((grant.gpu for grant in grants), wanted.version)
            await self._crew.load(wanted, grants)
            loaded = wanted

    async def _stand_down(self, grant: Grant) -> bool:
        """Whether the engine stands by now, within its budget."""
        if grant.gpu not in self._standby_slots or grant.gpu in self._too_large:
            return False
        try:
            size_bytes = await self._put_to_rest(grant)
            if self._is_over_budget(grant.gpu, size_bytes):
                return False
            await self._crew.stand_down([grant])
        except Exception as error:  # noqa: BLE001 - the edge: a worker that does not stand down is ended
            self._log.warning("did not stand down", gpu=grant.gpu, error=str(error))
            return False
        self._built.add(grant.gpu)
        return True

    async def _stand_by(self, gpu: GpuId) -> None:
        grant = Grant(gpu, NO_TOKEN)
        async with self._turn:
            self._being_built = gpu
            try:
                if grant not in self._crew.standbys:
                    await self._crew.start([grant], transition="")
                size_bytes = await self._put_to_rest(grant)
                if self._is_over_budget(gpu, size_bytes):
                    await self._crew.stop([grant], transition="")
                    return
            except Exception as error:  # noqa: BLE001 - the edge: a slot without a standby starts cold
                self._log.warning("standby did not start", gpu=gpu, error=str(error))
                return
            finally:
                self._being_built = ""
        self._built.add(gpu)
        self._log.info("engine stands by", gpu=gpu, memory_bytes=size_bytes)

    async def _put_to_rest(self, grant: Grant) -> int:
        """Build the engine, if there is none, without the memory that it needs at work. Returns the worker's memory."""
        rest = wire.WorkerCall(start_engine=wire.StartEngine(config_json=self._config_json, stands_by=True))
        return (await self._crew.ask(grant, rest)).started.memory_bytes

    def _is_over_budget(self, gpu: str, size_bytes: int) -> bool:
        if size_bytes <= self._standby_bytes:
            return False
        remedy = f"raise rollout.standby_memory_mib above {size_bytes >> 20}"
        self._log.warning("standby ended", gpu=gpu, memory_bytes=size_bytes, remedy=remedy)
        self._too_large.add(gpu)
        return True

    async def _until_no_standby_begins(self, grants: Sequence[Grant]) -> None:
        """Two starts on one slot would race. A standby that is being built is waited for: the engine is soon warm."""
        for grant in grants:
            task = self._standing_by.get(grant.gpu)
            if task is None:
                continue
            if self._being_built == grant.gpu:
                await asyncio.wait([task])
            else:
                await end_task(task)


def _age(snapshot: types_pb2.Snapshot) -> tuple[int, int]:
    return snapshot.incarnation, snapshot.version
