"""Leads and gates that receive the scheduler's calls, and answer each command by the events of its work.

They use the wire's messages, and the bus and the store in memory, so that the whole shell really runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from services.scheduler.policy.static import StaticPolicy
from services.scheduler.shell.codecs.state_codec import decode_state
from services.scheduler.shell.issuer import Issuer
from services.scheduler.shell.requests import Request
from services.scheduler.shell.service import SchedulerPorts, SchedulerService
from services.scheduler.state.cluster_state import ClusterState
from tests.component_bench import JOB, NODES, Changes, job_config, snapshot
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.memory_bus import MemoryBus
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.adapters.tables import state_cell
from tidegate.codec import decode_grants, encode_grants, fate_of
from tidegate.config.job_config import JobConfig
from tidegate.events import EventBody, EventSource
from tidegate.moves_log import MovesLog
from tidegate.ownership.adoption import adopt
from tidegate.ports.bus import BusLimits, EventConsumer, EventDelivery
from tidegate.ports.store import JobState, Ownership
from tidegate.runtime.announcer import Announcer
from tidegate.types import Grant, InstanceId, JobId, NodeId, Role, SampleId, TransitionId, instance_id
from tidegate.v1 import commands_pb2, events_pb2, instance_pb2

ACK_WAIT_S = 0.05
"""The wait before an unacknowledged event comes again. It is short, since tests lose acknowledgements."""


@dataclass
class WireCluster:
    """One job's cluster. A test observes commands by `before_send`, and drops acknowledgements by `before_ack`."""

    config: JobConfig
    bus: MemoryBus
    server: MemoryServer
    changes: Changes
    moves: Path
    sent: list[Request] = field(default_factory=list)
    decide_every_s: float = 1.0
    does_iterations: bool = True
    before_send: Callable[[Request], None] = lambda _: None
    before_ack: Callable[[EventDelivery], bool] = lambda _: True
    start: int = 1
    """The boot of the launcher and of the instances."""
    gates: tuple[Grant, ...] = ()
    """The tokens that gates of all nodes know, as instances tell when they join."""
    gates_asked_of: list[tuple[str, ...]] = field(default_factory=list)
    """The instances that each adoption knew."""
    _announcers: dict[str, Announcer] = field(default_factory=dict)
    _members: dict[Role, tuple[Grant, ...]] = field(default_factory=dict)
    _num_replicas: int = 0

    def announcer(self, source: str, role: Role | None = None) -> Announcer:
        if source not in self._announcers:
            events = EventSource(source, role=role, boot=self.start, now_ns=lambda: 0)
            self._announcers[source] = Announcer(self.bus.events, events, JOB)
        return self._announcers[source]

    def start_again(self) -> None:
        """All processes of the start before are gone. The store is back, and nobody has adopted it."""
        self.start += 1
        self._announcers.clear()
        self.sent.clear()
        self.server.restart()

    async def boot(self) -> None:
        """Every instance joins, and those of the first node lead."""
        for role in Role:
            for node in NODES:
                name = instance_id(role, node)
                joined = events_pb2.InstanceJoined(
                    instance=name, endpoint=f"at-{name}", boot=self.start, gates=encode_grants(self.gates)
                )
                await self.announcer(name, role).publish(joined, incarnation=0)
            name = instance_id(role, NODES[0])
            elected = events_pb2.LeadElected(instance=name, endpoint=f"at-{name}", epoch=self.start)
            await self.announcer(name, role).publish(elected, incarnation=0)

    async def submit(self, *, resume: bool = False) -> None:
        submitted = events_pb2.JobSubmitted(config_json=self.config.to_json(), resume=resume)
        await self.announcer("launcher").publish(submitted, incarnation=1)

    async def replica(self, *, store: CellStore | None = None) -> SchedulerService:
        """One more scheduler of the job."""
        self._num_replicas += 1
        store = store or await self.client()
        events = EventSource("scheduler", role=None, boot=self._num_replicas, now_ns=lambda: 0)
        announcer = Announcer(self.bus.events, events, JOB)
        consumer = await self.bus.events.consumer(JOB, "scheduler", on_dead_letter=announcer.publish_dead_letter)
        issuer = Issuer(store, announcer, send=self.send, ask_gate=self.ask_gate)
        watched = _WatchedConsumer(consumer, self)
        record = MovesLog(self.moves).append
        ports = SchedulerPorts(
            store,
            self.bus.events,
            watched,
            self.bus.copies,
            partial(adopt, store, self.bus.term),
            announcer,
            issuer,
            self.gate_reports,
            record,
        )
        return SchedulerService(
            JOB,
            ports,
            StaticPolicy(),
            decide_every_s=self.decide_every_s,
            lease_ttl_s=60.0,
            launcher_boot=self.start,
            copy_every=1,
        )

    async def client(self) -> WatchedStore:
        store = self.detached_client()
        await store.attach()
        return store

    def detached_client(self) -> WatchedStore:
        return WatchedStore(self.server, self.changes)

    def written_state(self) -> ClusterState:
        """The state that a replica would load now."""
        held = self.server.read_cell(state_cell(JOB))
        return decode_state(held.split(b"\n", 1)[1]) if held else ClusterState(job=JOB)

    async def gate_reports(self, state: ClusterState | None) -> dict[NodeId, tuple[()]]:
        """Reports of gates that never let a worker pass."""
        self.gates_asked_of.append(tuple(sorted(state.instances)) if state else ())
        return dict.fromkeys(NODES, ())

    async def ask_gate(self, endpoint: str, timeout_s: float) -> instance_pb2.GateReportResponse:
        return instance_pb2.GateReportResponse(node=endpoint.rpartition("@")[2])

    async def send(self, endpoint: str, request: Request, timeout_s: float) -> commands_pb2.CommandResult:
        """The lead takes the request and does its work at once."""
        self.before_send(request)
        self.sent.append(request)
        self.changes.notify()
        name = InstanceId(endpoint.removeprefix("at-"))
        await self._work(name, Role(name.partition("@")[0]), request)
        return commands_pb2.CommandResult(accepted=True)

    async def _work(self, name: InstanceId, role: Role, request: Request) -> None:
        header = request.header

        async def say(body: EventBody, **fields: Any) -> None:
            headers = {"incarnation": header.incarnation, "grants": self._members[role], **fields}
            await self.announcer(name, role).publish(body, **headers)

        match request:
            case commands_pb2.ScaleUpRequest():
                self._members[role] = decode_grants(request.members)
                committed = events_pb2.LayoutCommitted(layout=request.layout, grants=request.members)
                await say(committed, transition_id=header.transition_id)
                if role is Role.ACTOR:
                    await say(events_pb2.WeightsPublished(snapshot=snapshot(0, incarnation=header.incarnation)))
            case commands_pb2.LoadWeightsRequest():
                weights = request.weights
                await say(events_pb2.WeightsLoaded(version=weights.version, checksum=weights.checksum))
            case commands_pb2.OpenIterationRequest() if self.does_iterations:
                plan = request.plan
                ids = [
                    SampleId(header.incarnation, plan.iteration, plan.first_prompt + prompt, draw)
                    for prompt in range(plan.num_prompts)
                    for draw in range(plan.group_size)
                ]
                report = events_pb2.IterationReported(
                    generated=fate_of(ids) if role is Role.ROLLOUT else None,
                    trained=fate_of(ids) if role is Role.ACTOR else None,
                )
                await say(report, iteration=plan.iteration)
                if role is Role.ACTOR:
                    following = snapshot(plan.version + 1, incarnation=header.incarnation)
                    await say(events_pb2.WeightsPublished(snapshot=following), iteration=plan.iteration)
            case commands_pb2.ScaleDownRequest():
                released = events_pb2.GpusReleased(grants=request.grants)
                await say(released, transition_id=header.transition_id, grants=decode_grants(request.grants))


class WatchedStore(CellStore):
    """A store that notifies tests of every written state and cleared lease, and counts the reads of ownership."""

    def __init__(self, server: MemoryServer, changes: Changes) -> None:
        super().__init__(MemoryCells(server))
        self._changes = changes
        self.num_ownership_reads = 0

    async def ownership(self, job: JobId, *, known: Collection[TransitionId] = ()) -> Ownership:
        self.num_ownership_reads += 1
        return await super().ownership(job, known=known)

    async def save(self, job: JobId, payload: bytes, *, expected_write: int, version: int) -> JobState:
        saved = await super().save(job, payload, expected_write=expected_write, version=version)
        self._changes.notify()
        return saved

    async def release(self, job: JobId, holder: InstanceId) -> None:
        await super().release(job, holder)
        self._changes.notify()


class _WatchedConsumer:
    def __init__(self, consumer: EventConsumer, cluster: WireCluster) -> None:
        self._consumer = consumer
        self._cluster = cluster

    async def next(self, *, timeout_s: float) -> _WatchedDelivery | None:
        delivery = await self._consumer.next(timeout_s=timeout_s)
        return _WatchedDelivery(delivery, self._cluster) if delivery else None

    async def acknowledged(self) -> int:
        return await self._consumer.acknowledged()


class _WatchedDelivery:
    """A delivery whose acknowledgement is lost where `before_ack` returns False."""

    def __init__(self, delivery: EventDelivery, cluster: WireCluster) -> None:
        self._delivery = delivery
        self._cluster = cluster

    @property
    def sequence(self) -> int:
        return self._delivery.sequence

    @property
    def event(self) -> events_pb2.Event:
        return self._delivery.event

    async def ack(self) -> None:
        if self._cluster.before_ack(self._delivery):
            await self._delivery.ack()
        self._cluster.changes.notify()

    async def nak(self, *, delay_s: float = 0.0) -> None:
        await self._delivery.nak(delay_s=delay_s)

    async def dead_letter(self, reason: str) -> None:
        await self._delivery.dead_letter(reason)


@asynccontextmanager
async def wire_cluster(
    tmp_path: Path, *, adopted: bool = True, max_message_bytes: int = 8 * 2**20
) -> AsyncIterator[WireCluster]:
    limits = BusLimits(event_ack_wait_s=ACK_WAIT_S, kept_events=8)
    bus = MemoryBus(limits, max_message_bytes=max_message_bytes)
    await bus.streams.open_job(JOB)
    server = MemoryServer()
    if adopted:
        server.adopt(1)
        await bus.term.advance(expected_revision=0, term=1)
    yield WireCluster(job_config(tmp_path), bus, server, Changes(), tmp_path / "moves.jsonl")


@asynccontextmanager
async def running(service: SchedulerService) -> AsyncIterator[asyncio.Task[None]]:
    """Run the replica until the end of the block, and raise its exception there."""
    stopping = asyncio.Event()
    task = asyncio.create_task(service.run(stopping))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]  # it is not None
