"""Real workers of the actor's instances, under its lead, over the store in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from services.actor.lead import ActorLead
from tests.component_bench import JOB, NODES
from tests.integration.runtime.nodes import fork_server
from tests.unit.actor.actor_bench import FIRST, SECOND, Training, training
from tests.unit.actor.suspend_bench import SuspendBench
from tidegate.events import EventSource
from tidegate.gate import Gate
from tidegate.job import JobFolder, load_job
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.crew import Crew
from tidegate.runtime.fork_client import ForkServerLauncher
from tidegate.runtime.instance import LocalInstance
from tidegate.runtime.lead import LeadTools
from tidegate.runtime.snapshots import SnapshotStore
from tidegate.runtime.workers import LocalWorkers, WorkerHome
from tidegate.types import GpuId, Grant, Layout, NodeId, Role, instance_id, node_of
from tidegate.v1 import events_pb2

PATIENCE_S = 120.0
"""The fork server imports torch and Megatron first."""
PRELOADED = "tidegate.megatron.cpu_stand_in:install,services.actor.worker"


class NoShards:
    """No snapshot comes from another node."""

    async def fetch(self, *_: object, **__: object) -> None:
        raise AssertionError("a snapshot was asked for")


class RealWorkers(SuspendBench):
    """The bench of suspensions, with real instances in place of the fake ones."""

    def __init__(self, of: Training) -> None:
        super().__init__(of)
        self.workers: dict[NodeId, LocalWorkers] = {}
        self.gates: dict[NodeId, Gate] = {}
        self.deaths: asyncio.Queue[Grant] = asyncio.Queue()
        """The workers whose death their instance noticed."""

    async def event(
        self, kind: str, *, count: int = 1, which: Callable[[events_pb2.Event], bool] = lambda _: True
    ) -> events_pb2.Event:
        """The last of the first `count` such events. AssertionError once the component fails."""
        numbers = itertools.count(1)
        async with asyncio.timeout(PATIENCE_S), aclosing(self.of.bench.bus.events.read(JOB, follow=True)) as events:
            async for _, event in events:
                found = event.WhichOneof("body")
                if found == "failed" and event.failed.what == events_pb2.Failed.WHAT_COMPONENT:
                    raise AssertionError(f"waiting for {kind}: {event.failed.message}")
                if found == "resize_failed":
                    raise AssertionError(f"waiting for {kind}: {event.resize_failed.message}")
                if found == kind and which(event) and next(numbers) == count:
                    return event
        raise AssertionError("the stream ended")

    async def start_workers(self) -> None:
        await self.store.register(self.of.bench.config.slots(Role.ACTOR))
        name, self.grants = await self.plan([FIRST, SECOND], Layout(dp=2))
        await self.commit_start(name)
        self.of.take(self.of.bench.scale_up(self.grants))
        await self.event("weights_published")

    def process(self, gpu: str) -> psutil.Process:
        worker = self.workers[node_of(GpuId(gpu))]._workers[GpuId(gpu)]
        return psutil.Process(worker.process.pid)

    async def note_death(self, grant: Grant, exit_status: int, why: str) -> None:
        self.deaths.put_nowait(grant)

    def is_held(self, gpu: str) -> bool:
        (state,) = [each for each in self.gates[node_of(GpuId(gpu))].report() if each.gpu == gpu]
        return state.held


@asynccontextmanager
async def real_workers(tmp_path: Path, memory: Path, **sections: Any) -> AsyncIterator[RealWorkers]:
    """`sections` change the config's sections."""
    actor = {"num_logical_shards": 4, "layout": {"dp": 2}, **sections.pop("actor", {"standby": "4"})}
    async with AsyncExitStack() as closing:
        closing.enter_context(fork_server(tmp_path / "fork.sock", "--preload", PRELOADED))
        of = await closing.enter_async_context(
            training(tmp_path, actor=actor, runtime={"host_memory_root": str(memory)}, **sections)
        )
        at, bench = RealWorkers(of), of.bench
        launcher = await ForkServerLauncher.connect(tmp_path / "fork.sock", timeout_s=PATIENCE_S)
        instances: dict[NodeId, LocalInstance] = {}
        for node in NODES:
            home = WorkerHome(
                entry="services.actor.worker:main",
                log_dir=tmp_path / "logs",
                timeline=tmp_path / "timeline" / f"{node}.jsonl",
                works_for="bench actor",
                env={"OMP_NUM_THREADS": "1"},
            )
            at.gates[node] = Gate(tmp_path / node / "gate")
            at.workers[node] = LocalWorkers(home, gate=at.gates[node], launcher=launcher, on_death=at.note_death)
            closing.push_async_callback(at.workers[node].aclose)
            snapshots = SnapshotStore(tmp_path / node / "snapshots", node=node, source=NoShards())  # type: ignore[arg-type]  # never asked
            instances[node] = LocalInstance(
                JOB,
                node=node,
                gpus=bench.config.cluster.gpus(),
                workers=at.workers[node],
                gate=at.gates[node],
                snapshots=snapshots,
                timeout_s=PATIENCE_S,
            )
        crew = Crew(
            JOB,
            lambda instance, _: instances[NodeId(instance.partition("@")[2])],
            call_timeout_s=PATIENCE_S,
            work_timeout_s=PATIENCE_S,
        )
        source = EventSource(instance_id(Role.ACTOR, NODES[0]), role=Role.ACTOR, boot=1, now_ns=lambda: 0)
        tools = LeadTools(
            NODES[0],
            load_job(bench.config),
            JobFolder.of(bench.config),
            crew,
            bench.samples,
            Announcer(bench.bus.events, source, JOB),
            bench.store,
        )
        bench.leads.append(ActorLead(tools))
        yield at


async def trained(at: RealWorkers, *, iteration: int = 0) -> str:
    """Train the iteration and close it. Returns the logical weights' sum in the version that follows."""
    await at.of.scored(range(4))
    assert (await at.event("iteration_reported")).iteration_reported.trained.num_samples == 8
    at.of.close(iteration)
    return (await at.event("weights_published", count=2)).weights_published.snapshot.weights_checksum
