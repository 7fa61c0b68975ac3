"""A lead that notes its acts, and its host over the store in memory. Only a test moves the store's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.component_bench import JOB, NODES, Bench, Changes, bench, replied
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.codec import decode_grants
from tidegate.config.sections.job import RuntimeSection
from tidegate.events import EventSource
from tidegate.job import Job
from tidegate.ownership.adoption import adopt
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable
from tidegate.ports.store import Identity, LeadRecord
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.host import ComponentHost, Seat
from tidegate.runtime.lead import Lead, LeadTools
from tidegate.types import Grant, InstanceId, JobId, NodeId, Role, instance_id
from tidegate.v1 import commands_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

BEAT_S = 0.01
LEAD_TTL_MS, LEASE_TTL_MS = 30, 60
"""The TTL by the store's and the host's clock, which stand still. A host checks every third of it by the real clock."""
ROLE = Role.INFERENCE


class Idle:
    """A worker that answers every call."""

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        yield replied(call)


class DiaryLead(Lead):
    """Notes its acts. Every act fails with `failure` if it is set. Iterations last until `may_end`."""

    def __init__(self, tools: LeadTools, changes: Changes) -> None:
        super().__init__(tools)
        self.diary: list[str] = []
        self.failure: Exception | None = None
        self.iteration_failure: Exception | None = None
        self.may_end = asyncio.Event()
        self._changes = changes

    def write(self, line: str) -> None:
        self.diary.append(line)
        self._changes.notify()

    async def scale_up(self, request: commands_pb2.ScaleUpRequest) -> None:
        self.write(f"scale up in {self.incarnation}")
        if self.failure is not None:
            raise self.failure
        await self.crew.start(decode_grants(request.grants), transition=request.header.transition_id)
        await self.announce_layout(request, next_iteration=5)

    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        self.write(f"load {request.weights.version}")
        if self.failure is not None:
            raise self.failure

    async def run_iteration(self, plan: types_pb2.IterationPlan) -> None:
        self.write(f"begin {plan.iteration}")
        try:
            await self.may_end.wait()
            if (failure := self.failure or self.iteration_failure) is not None:
                raise failure
            self.write(f"end {plan.iteration}")
        except asyncio.CancelledError:
            self.write(f"cancel {plan.iteration}")
            raise

    async def supersede(self) -> None:
        self.write("supersede")

    async def close_iteration(self, request: commands_pb2.CloseIterationRequest) -> None:
        self.write(f"close {request.iteration}")


class Diary:
    """Makes leads that report their notes to `changes`."""

    changes: Changes

    def make_lead(self, tools: LeadTools) -> DiaryLead:
        return DiaryLead(tools, self.changes)

    def make_worker(self, job: Job, grant: Grant, changes: Changes) -> Idle:
        return Idle()


class WatchedStore(CellStore):
    """Reports each look at the lead and each renewed lease. While it is away it answers nothing and does nothing."""

    def __init__(self, server: MemoryServer, changes: Changes) -> None:
        super().__init__(MemoryCells(server))
        self.is_away = False
        self.is_away_when_attached_to = False
        self.num_renewals = 0
        self.num_refused = 0
        self._changes = changes

    async def attach(self) -> Identity:
        self._answer(is_away=self.is_away or self.is_away_when_attached_to)
        try:
            return await super().attach()
        except StoreNotAdopted:
            self._refused()
            raise

    async def renew(self, job: JobId, holder: InstanceId, *, ttl_ms: int) -> bool:
        self._answer(is_away=self.is_away)
        was_in_force = await super().renew(job, holder, ttl_ms=ttl_ms)
        self.num_renewals += 1
        self._changes.notify()
        return was_in_force

    async def renew_lead(self, lead: LeadRecord, *, ttl_ms: int) -> LeadRecord | None:
        try:
            return await super().renew_lead(lead, ttl_ms=ttl_ms)
        finally:
            self._changes.notify()

    def _answer(self, *, is_away: bool) -> None:
        if is_away:
            self._refused()
            raise StoreUnavailable("nobody answers")

    def _refused(self) -> None:
        self.num_refused += 1
        self._changes.notify()


class Hosting:
    """One instance's host, and the events of the cluster around it."""

    def __init__(self, opened: Bench[DiaryLead, Idle], server: MemoryServer) -> None:
        self.bench = opened
        self.server = server
        self.store = WatchedStore(server, opened.changes)
        self.now_s = 0.0
        self.gates: list[Grant] = []
        self.stopping = asyncio.Event()
        self.hosts: list[ComponentHost] = []
        self.running: list[asyncio.Task[None]] = []

    async def other_client(self) -> CellStore:
        store = CellStore(MemoryCells(self.server))
        await store.attach()
        return store

    def start(self, node: NodeId = NODES[0], *, boot: int = 1, beat_s: float = BEAT_S) -> ComponentHost:
        name = instance_id(ROLE, node)
        seat = Seat(JOB, ROLE, name, boot, f"at-{node}")
        source = EventSource(name, role=ROLE, boot=100 + boot, now_ns=lambda: 0)
        host = ComponentHost(
            seat,
            store=self.store,
            announcer=Announcer(self.bench.bus.events, source, JOB),
            times=RuntimeSection(
                lead_ttl_s=LEAD_TTL_MS / 1000 * beat_s / BEAT_S, lease_ttl_s=LEASE_TTL_MS / 1000 * beat_s / BEAT_S
            ),
            make_lead=self.bench.new_lead,
            gates=self._gates,
            now_s=lambda: self.now_s,
        )
        self.hosts.append(host)
        self.running.append(asyncio.create_task(host.run(self.stopping)))
        return host

    async def _gates(self) -> list[Grant]:
        return self.gates

    async def elected(self, *, count: int = 1) -> int:
        """The epoch of the election with this number."""
        return (await self.bench.published("lead_elected", count=count))[-1].lead_elected.epoch

    async def lead_in_force(self) -> LeadRecord:
        """The lead in force. The other node's instance asks, and so leads only if no instance did."""
        other = instance_id(ROLE, NODES[1])
        return await self.store.campaign(JOB, ROLE, instance=other, endpoint="asks", ttl_ms=LEAD_TTL_MS)

    async def next_beat(self) -> None:
        """Waits for a whole turn of a host: the second renewal from now comes after it."""
        seen = self.store.num_renewals
        await self.bench.changes.until(lambda: self.store.num_renewals >= seen + 2)

    async def refused(self, *, count: int = 1) -> None:
        """Waits until an absent or unadopted store was asked this many more times."""
        seen = self.store.num_refused
        await self.bench.changes.until(lambda: self.store.num_refused >= seen + count)

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.gather(*self.running)


@asynccontextmanager
async def hosting(tmp_path: Path) -> AsyncIterator[Hosting]:
    diary, server = Diary(), MemoryServer()
    async with bench(tmp_path, ROLE, diary.make_lead, diary.make_worker) as opened:
        diary.changes = opened.changes
        hosted = Hosting(opened, server)
        await adopt(hosted.store, opened.bus.term, no_gates)
        try:
            yield hosted
        finally:
            await hosted.stop()


async def no_gates() -> dict[NodeId, tuple[()]]:
    return {}
