"""The rollout's lead over real worker processes, each with a real SGLang server that is slow enough to be met half-way.

What goes between the lead and the workers is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from services.rollout.lead import RolloutLead
from services.rollout.worker import EngineWorker
from tests.component_bench import NODES
from tests.sglang_env import sglang_python
from tests.unit.rollout.fake_engines import FIRST, SECOND
from tests.unit.rollout.real_engines import RealBench, RealEngines, real_rollout
from tidegate.codec import decode_sample_id
from tidegate.gate import Gate
from tidegate.job import snapshot_root
from tidegate.runtime.instance import LocalInstance
from tidegate.runtime.remote_instance import GrpcShardSource
from tidegate.runtime.snapshots import SnapshotStore
from tidegate.runtime.subprocess_launcher import SubprocessLauncher
from tidegate.runtime.worker import Answer, WorkerChannel, run_worker
from tidegate.runtime.workers import LocalWorkers, WorkerHome
from tidegate.types import GpuId, Grant, JobId, NodeId, SampleId
from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire

PATIENCE_S = 280.0
"""A server's start takes 20 s, and over a minute on a busy machine."""
STEP_S = 0.03
LAUNCHER = "cpu/launch.py"
_LOOK_AGAIN_S = 0.02
_SCHEDULER = "sglang::scheduler"


class SlowWorker(EngineWorker):
    """A worker whose server sleeps in each step, so that its responses outlast a move."""

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        yield from super().handle(call)
        if call.HasField("load_shards"):
            _, engine = self._started()
            engine.server.client.post("/slow_down", {"forward_sleep_time": STEP_S}, timeout_s=30.0)  # type: ignore[attr-defined] # an SGLang engine


def main(channel: WorkerChannel) -> None:
    """The worker's entry."""
    worker = SlowWorker(GpuId(channel.grant.gpu))
    try:
        run_worker(channel, worker, stepper=worker, waits_for="prompts")
    finally:
        worker.close()


@dataclass
class Records:
    """Calls by GPU and kind, as they are sent, and the unfinished responses that came back, by GPU and sample."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    handed_over: list[tuple[str, SampleId, samples_pb2.Sample]] = field(default_factory=list)


class RecordingInstance(LocalInstance):
    records: Records

    async def call(
        self, grant: Grant, call: wire.WorkerCall, *, timeout_s: float
    ) -> AsyncGenerator[wire.WorkerReply, None]:
        self.records.calls.append((grant.gpu, call.WhichOneof("body") or ""))
        async with aclosing(super().call(grant, call, timeout_s=timeout_s)) as replies:
            async for reply in replies:
                sample = reply.generated.sample
                if reply.HasField("generated") and sample.finish == samples_pb2.FINISH_REASON_ABORT:
                    self.records.handed_over.append((grant.gpu, decode_sample_id(sample.id), sample))
                yield reply


@dataclass
class ServerBench:
    """A lead's bench with its records. `deaths`: the exit status of each worker that died by itself, by GPU."""

    of: RealBench
    records: Records
    workers: dict[NodeId, LocalWorkers]
    deaths: dict[str, int]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if holds():
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def until_generated(self, lead: RolloutLead, grant: Grant, num_tokens: int) -> None:
        """Until some response on the engine has so many tokens, as its worker estimates them."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reply = await lead.crew.glance(grant, wire.WorkerCall(look=wire.Look()), timeout_s=30.0)
                if reply is not None and max(reply.load.num_tokens, default=0) >= num_tokens:
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)

    def servers(self, gpu: str) -> list[psutil.Process]:
        """The living servers, without their keepers, of the slot's worker."""
        return [each for each in self._processes(gpu) if each.cmdline()[1:2] and each.cmdline()[1].endswith(LAUNCHER)]

    def scheduler(self, gpu: str) -> psutil.Process:
        """The server's process that generates. While it is stopped, no call to the server ends that needs it."""
        return next(each for each in self._processes(gpu) if _SCHEDULER in " ".join(each.cmdline()))

    def _processes(self, gpu: str) -> list[psutil.Process]:
        folder = str(self.of.folder.engine(GpuId(gpu)))
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.cwd() == folder:
                    found.append(process)
        return found


@asynccontextmanager
async def server_bench(tmp_path: Path, *, standby: str = "", **algorithm: Any) -> AsyncIterator[ServerBench]:
    """Two slots for engines, on two nodes. `standby`: the slots on which engines stand by."""
    rollout = {
        "engine": "sglang",
        "sglang": {"python": str(sglang_python()), "dtype": "float32", "start_timeout_s": PATIENCE_S - 20},
        "standby": standby,
    }
    runtime = {"command_deadline_s": PATIENCE_S}
    sections: dict[str, Any] = {"rollout": rollout, "algorithm": algorithm, "runtime": runtime}
    async with real_rollout(tmp_path, RealEngines(), **sections) as of:
        of.patience_s = PATIENCE_S
        bench = ServerBench(of, Records(), {}, {})
        for node in NODES:
            instance = _instance(bench, node, tmp_path)
            of.instances[node] = instance  # type: ignore[assignment] # a real one in place of the bench's own
        try:
            yield bench
        finally:
            for lead in of.leads:
                await lead.aclose()
            for workers in bench.workers.values():
                await workers.aclose()


def _instance(bench: ServerBench, node: NodeId, folder: Path) -> RecordingInstance:
    async def died(grant: Grant, status: int, _: str) -> None:
        bench.deaths[grant.gpu] = status

    home = WorkerHome(
        entry=f"{__name__}:main",
        log_dir=folder / "logs",
        timeline=folder / f"{node}.jsonl",
        works_for="rollout",
        start_timeout_s=120.0,
    )
    gate = Gate(folder / node / "gate")
    job, config = JobId(bench.of.config.job), bench.of.config
    bench.workers[node] = LocalWorkers(home, gate=gate, launcher=SubprocessLauncher(allow=("tests.",)), on_death=died)
    snapshots = SnapshotStore(snapshot_root(config, node), node=node, source=GrpcShardSource(_no_channel))
    instance = RecordingInstance(
        job,
        node=node,
        gpus=config.cluster.gpus(),
        workers=bench.workers[node],
        gate=gate,
        snapshots=snapshots,
        timeout_s=60.0,
    )
    instance.records = bench.records
    return instance


def _no_channel(endpoint: str) -> Any:
    raise AssertionError(f"both nodes have the weights; nothing is at {endpoint}")


def ordered(grants: Sequence[Grant]) -> tuple[Grant, Grant]:
    first, second = grants
    assert (first.gpu, second.gpu) == (FIRST, SECOND)
    return first, second
