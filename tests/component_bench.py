"""A component without processes: its real lead and crew on the bus in memory, over instances that answer truthfully.

Time stands still except for `ManualClock.advance`. Nothing here sleeps: `Changes.until` and `Bench.published` wait for
their condition, and fail after `PATIENCE_S`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tidegate.adapters.cell_store import COUNTS_PER_TERM, CellStore
from tidegate.adapters.memory_bus import MemoryBus
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.checksums import combined_checksum
from tidegate.codec import encode_grants, encode_layout
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.events import EventSource
from tidegate.job import Job, JobFolder, load_job, snapshot_folder
from tidegate.ports.bus import BusLimits, EventLog, SampleStream
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.crew import Crew, InstancePort, WorkerGone, WorkerUnreachable
from tidegate.runtime.lead import Lead, LeadTools
from tidegate.tasks import Task
from tidegate.types import NO_TOKEN, Grant, JobId, NodeId, Role, Token, instance_id
from tidegate.v1 import commands_pb2, events_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

PATIENCE_S = 60.0
"""The longest wait for something that should happen at once."""
JOB = JobId("bench")
NODES = (NodeId("n0"), NodeId("n1"))
ACK_WAIT_S = 30.0


class ManualClock:
    """Moves only when a test advances it. A task that sleeps on it waits for that."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._num_asleep = 0
        self._moved = asyncio.Event()
        self._slept = asyncio.Event()

    def now(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        until = self.now_s + duration_s
        self._num_asleep += 1
        self._slept.set()
        try:
            while self.now_s < until:
                await self._moved.wait()
        finally:
            self._num_asleep -= 1

    async def advance(self, duration_s: float) -> None:
        """Advances once some task sleeps: a task that is about to sleep would sleep past the end."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._num_asleep:
                self._slept.clear()
                await self._slept.wait()
        self.now_s += duration_s
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


class Changes:
    """Wakes the waiting tasks after a change that a test may ask about."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, holds: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(patience_s):
            while not holds():
                await self._changed.wait()


class PublishedEvents:
    """The event log as the leads see it. `all` has every event, also those that later ones replace on the stream."""

    def __init__(self, log: EventLog, changes: Changes) -> None:
        self._log, self._changes = log, changes
        self.all: list[events_pb2.Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def publish(self, event: events_pb2.Event) -> int:
        sequence = await self._log.publish(event)
        self.all.append(event)
        self._changes.notify()
        return sequence


class Worker(Protocol):
    """One slot's process. It answers a call as the real one would."""

    def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]: ...


W = TypeVar("W", bound=Worker)
L = TypeVar("L", bound=Lead)


@dataclass
class _Slot(Generic[W]):
    grant: Grant
    worker: W
    died: asyncio.Event = field(default_factory=asyncio.Event)


class FakeInstance(Generic[W]):
    """One instance with its workers. `kill` affects the open calls like a SIGKILL of the worker."""

    def __init__(self, node: NodeId, config: JobConfig, make_worker: Callable[[Grant], W]) -> None:
        self.node = node
        self.drops: list[tuple[int, tuple[int, ...]]] = []
        self.started: list[Grant] = []
        self.is_silent = False
        """Whether it gives no answer, like a node that cannot be reached."""
        self.silence = "gave no answer"
        self.num_unanswered = 0
        self.unanswered = Changes()
        """Notified of each call without an answer."""
        self.timeouts_s: list[float] = []
        self._config = config
        self._make_worker = make_worker
        self._slots: dict[str, _Slot[W]] = {}

    def kill(self, gpu: str) -> None:
        self._slots.pop(gpu).died.set()

    async def start_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> None:
        for grant in grants:
            running = self._slots.get(grant.gpu)
            if running is not None and running.grant.stands_by and not grant.stands_by:
                running.grant = grant
            elif running is None or running.grant != grant:
                self.started.append(grant)
                self._slots[grant.gpu] = _Slot(grant, self._make_worker(grant))

    async def stop_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> int:
        self._answer()
        for grant in grants:
            running = self._slots.get(grant.gpu)
            if running is not None and running.grant.token <= grant.token:
                self.kill(grant.gpu)
        return 0

    async def stand_down(self, job: JobId, grants: Sequence[Grant]) -> None:
        self._answer()
        for grant in grants:
            slot = self._slots.get(grant.gpu)
            if slot is None or slot.grant != grant:
                raise WorkerGone(f"no worker of {grant.gpu} under token {grant.token}")
            slot.grant = Grant(grant.gpu, NO_TOKEN)

    async def workers(self, job: JobId) -> tuple[Grant, ...]:
        self._answer()
        return tuple(slot.grant for slot in self._slots.values())

    async def call(
        self, grant: Grant, call: wire.WorkerCall, *, timeout_s: float
    ) -> AsyncGenerator[wire.WorkerReply, None]:
        self.timeouts_s.append(timeout_s)
        self._answer()
        slot = self._slots.get(grant.gpu)
        if slot is None or slot.grant != grant:
            raise WorkerGone(f"no worker of {grant.gpu} under token {grant.token}")
        async with aclosing(slot.worker.handle(call)) as replies:
            while (reply := await _unless_dead(slot, replies)) is not None:
                yield reply

    async def store_address(self, grant: Grant) -> tuple[str, int]:
        return "127.0.0.1", 29500

    async def fetch_snapshot(self, snapshot: types_pb2.Snapshot) -> str:
        folder = snapshot_folder(self._config, self.node, incarnation=snapshot.incarnation, version=snapshot.version)
        return str(folder)

    async def drop_snapshots(self, job: JobId, *, before_version: int, keep: Sequence[int]) -> None:
        self._answer()
        self.drops.append((before_version, tuple(keep)))

    def _answer(self) -> None:
        if self.is_silent:
            self.num_unanswered += 1
            self.unanswered.notify()
            raise WorkerUnreachable(f"the instance on {self.node} {self.silence}")


async def _unless_dead(slot: _Slot[W], replies: AsyncIterator[wire.WorkerReply]) -> wire.WorkerReply | None:
    reply = asyncio.ensure_future(anext(replies, None))
    death = asyncio.ensure_future(slot.died.wait())
    try:
        await asyncio.wait([reply, death], return_when=asyncio.FIRST_COMPLETED)
        if slot.died.is_set():
            raise WorkerGone(f"worker of {slot.grant.gpu} died")
        return reply.result()
    finally:
        for task in (reply, death):
            task.cancel()
        await asyncio.gather(reply, death, return_exceptions=True)


@dataclass
class Bench(Generic[L, W]):
    """One component of one job, with its leads, in the order of their start."""

    config: JobConfig
    role: Role
    bus: MemoryBus
    clock: ManualClock
    changes: Changes
    events: PublishedEvents
    samples: SampleStream
    instances: dict[NodeId, FakeInstance[W]]
    make: Callable[[LeadTools], L]
    server: MemoryServer
    store: CellStore
    patience_s: float = PATIENCE_S
    leads: list[L] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def folder(self) -> JobFolder:
        return JobFolder.of(self.config)

    def new_lead(self) -> L:
        """Makes a lead, as an election does. The one before goes on until it is closed."""
        crew = Crew(JOB, self._connect, call_timeout_s=self.patience_s, work_timeout_s=2 * self.patience_s)
        boot = len(self.leads) + 1
        source = EventSource(instance_id(self.role, NODES[0]), role=self.role, boot=boot, now_ns=lambda: 0)
        announcer = Announcer(self.bus.events, source, JOB)
        job = load_job(self.config)
        tools = LeadTools(NODES[0], job, self.folder, crew, self.samples, announcer, self.store)
        self.leads.append(self.make(tools))
        return self.leads[-1]

    def header(self, *, incarnation: int = 1, transition: str = "") -> commands_pb2.CommandHeader:
        """A header with a new command id."""
        return commands_pb2.CommandHeader(
            id=f"command-{next(self.numbers)}",
            job=JOB,
            incarnation=incarnation,
            transition_id=transition,
            lead_epoch=COUNTS_PER_TERM + len(self.leads),
            term=1,
            instances=[
                commands_pb2.InstanceAddress(instance=instance_id(self.role, node), endpoint=f"at-{node}", boot=1)
                for node in self.instances
            ],
        )

    def grants(self, *, term: int = 1) -> tuple[Grant, ...]:
        """The grants of the component's GPUs, in rank order."""
        gpus = self.config.placement(self.role)
        return tuple(Grant(gpu, Token(term, number)) for number, gpu in enumerate(gpus, start=1))

    def scale_up(
        self,
        grants: Sequence[Grant] | None = None,
        *,
        members: Sequence[Grant] | None = None,
        incarnation: int = 1,
        **fields: Any,
    ) -> commands_pb2.ScaleUpRequest:
        grants = self.grants() if grants is None else grants
        return commands_pb2.ScaleUpRequest(
            header=self.header(incarnation=incarnation, transition="start"),
            grants=encode_grants(grants),
            members=encode_grants(grants if members is None else members),
            layout=encode_layout(self.config.layout(self.role)),
            config_json=self.config.to_json(),
            **fields,
        )

    def open_iteration(
        self,
        iteration: int = 0,
        *,
        incarnation: int = 1,
        version: int | None = None,
        first_prompt: int | None = None,
    ) -> commands_pb2.OpenIterationRequest:
        """Without extra prompts before it, the iteration's number gives the first prompt."""
        algorithm = self.config.algorithm
        plan = types_pb2.IterationPlan(
            iteration=iteration,
            version=iteration if version is None else version,
            first_prompt=iteration * algorithm.prompts_per_iteration if first_prompt is None else first_prompt,
            num_prompts=algorithm.prompts_per_iteration,
            group_size=algorithm.group_size,
            num_minibatches=algorithm.n_minibatches,
            seed=self.config.seed,
            max_extra_prompts=algorithm.max_extra_prompts,
        )
        return commands_pb2.OpenIterationRequest(header=self.header(incarnation=incarnation), plan=plan)

    def evaluate(self, version: int = 0, *, incarnation: int = 1) -> commands_pb2.EvaluateRequest:
        """The evaluation of the iteration that trains on the version."""
        plan = types_pb2.EvaluationPlan(iteration=version, version=version)
        return commands_pb2.EvaluateRequest(header=self.header(incarnation=incarnation), plan=plan)

    async def published(self, body: str, *, count: int = 1) -> list[events_pb2.Event]:
        """The first `count` events with `body`, as they come. A component that failed for good is an error."""

        def found() -> list[events_pb2.Event]:
            return [event for event in self.events.all if event.WhichOneof("body") == body]

        def fatal() -> list[events_pb2.Event]:
            return [event for event in self.events.all if event.failed.fatal and body != "failed"]

        await self.changes.until(lambda: len(found()) >= count or bool(fatal()), patience_s=self.patience_s)
        if len(found()) < count:
            raise AssertionError(f"waiting for {body}: {fatal()[0].failed.message}")
        return found()[:count]

    async def kinds(self) -> list[str]:
        """The kinds of all events so far, in order."""
        return [event.WhichOneof("body") or "" for event in self.events.all]

    def _connect(self, instance: str, endpoint: str) -> InstancePort:
        return self.instances[NodeId(instance.partition("@")[2])]


@asynccontextmanager
async def bench(
    tmp_path: Path,
    role: Role,
    make: Callable[[LeadTools], L],
    make_worker: Callable[[Job, Grant, Changes], W],
    *,
    wrap: Callable[[SampleStream, Changes], SampleStream] = lambda samples, _: samples,
    max_deliveries: int = 10,
    **sections: dict[str, Any],
) -> AsyncIterator[Bench[L, W]]:
    """`sections` change the config's sections. `wrap` puts an observer between the leads and the bus."""
    config = job_config(tmp_path, **sections)
    clock, changes = ManualClock(), Changes()
    limits = BusLimits(sample_ack_wait_s=ACK_WAIT_S, max_deliveries=max_deliveries)
    bus = MemoryBus(limits, now=clock.now, sleep=clock.sleep)
    await bus.streams.open_job(JOB)
    job = load_job(config)
    instances = {
        node: FakeInstance(node, config, lambda grant: make_worker(job, grant, changes))
        for node in NODES
        if any(gpu.startswith(f"{node}/") for gpu in (*config.slots(role), *config.standby()))
    }
    server = MemoryServer()
    server.adopt(1)
    store = CellStore(MemoryCells(server))
    await store.attach()
    # Hosts and leads of a test publish through the bus.
    published = bus.events = PublishedEvents(bus.events, changes)  # type: ignore[assignment]
    samples = wrap(bus.samples, changes)
    opened = Bench(config, role, bus, clock, changes, published, samples, instances, make, server, store)
    opened.folder.root.mkdir(parents=True)
    try:
        yield opened
    finally:
        for lead in opened.leads:
            await lead.aclose()


def job_config(tmp_path: Path, **sections: dict[str, Any]) -> JobConfig:
    """Two nodes of four slots: the actor on n0, rollout and inference on both."""
    raw: dict[str, Any] = {
        "job": JOB,
        "seed": 3,
        "output_dir": str(tmp_path / "jobs"),
        "cluster": {
            "nodes": dict.fromkeys(NODES, 4),
            "component_placement": {"actor": "0-1", "rollout": "2,6", "inference": "3,7"},
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 16,
            "ffn_hidden_size": 32,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 8,
            "max_seq_len": 80,
        },
        "task": {"name": "countdown"},
        "algorithm": {
            "iterations": 3,
            "prompts_per_iteration": 4,
            "group_size": 2,
            "n_minibatches": 2,
            "max_new_tokens": 64,
        },
        "actor": {"learning_rate": 1e-3, "layout": {"dp": 2}},
        "inference": {"layout": {"dp": 2}},
        "scheduler": {"policy": "static"},
        "runtime": {"host_memory_root": str(tmp_path / "memory"), "ack_wait_s": ACK_WAIT_S},
    }
    for name, fields in sections.items():
        raw[name] = {**raw.get(name, {}), **fields}
    return parse_config(raw)


def task_of(job: Job) -> Task:
    """The task of a job that has a built-in one."""
    assert job.task is not None
    return job.task


def replied(call: wire.WorkerCall, body: Any = None, *, last: bool = True) -> wire.WorkerReply:
    """A reply with the body in its field."""
    reply = wire.WorkerReply(call_id=call.call_id, last=last)
    if body is not None:
        fields = wire.WorkerReply.DESCRIPTOR.oneofs_by_name["body"].fields
        (name,) = [each.name for each in fields if each.message_type is body.DESCRIPTOR]
        getattr(reply, name).SetInParent()
        getattr(reply, name).CopyFrom(body)
    return reply


def snapshot(version: int, *, incarnation: int = 1) -> types_pb2.Snapshot:
    """A published version as its readers get it."""
    shard = types_pb2.SnapshotShard(node=NODES[0], endpoint="at-n0", file="rank00000", checksum=f"sum-{version}")
    return types_pb2.Snapshot(
        job=JOB,
        incarnation=incarnation,
        version=version,
        shards=[shard],
        checksum=combined_checksum({shard.file: shard.checksum}),
    )


def loaded(call: wire.WorkerCall) -> wire.WorkerReply:
    """The answer of a worker that loaded the requested version."""
    shards = call.load_shards
    checksum = combined_checksum(dict(zip(shards.files, shards.checksums, strict=True)))
    return replied(call, wire.LoadedWeights(version=shards.version, checksum=checksum))
