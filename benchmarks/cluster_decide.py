"""The time of one round of the cluster's scheduler: 1,000 jobs wait, 100 run on 100 nodes of 8 GPUs.

In each round one of the running jobs has ended, so that the head of the queue is placed, and another job was submitted.
A round reads all records, sets GPUs free, decides, writes and asks the agents. The store is in memory and the agents
are simulated: a round on servers adds the time of their answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from services.scheduler.cluster.loop import ClusterLoop
from tidegate.adapters.memory_bus import MemoryBus
from tidegate.adapters.memory_store import MemoryServer, memory_store
from tidegate.cluster.kept_queue import KeptQueue
from tidegate.cluster.placement import cluster_gpus
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.config.files import load_sources, sources_of
from tidegate.types import JobId, NodeId
from tidegate.v1 import cluster_pb2

QUEUED, RUNNING, QUICK_QUEUED = 1000, 100, 100
ROUNDS, QUICK_ROUNDS = 300, 30
NODES = {NodeId(f"n{number}"): 8 for number in range(100)}
MEMORY_BYTES, JOB_BYTES = 256 << 30, 16 << 30
"""The host memory of a node, and what a job needs of it."""
_CONFIG = "examples/grpo.yaml"
"""A job on eight GPUs of two nodes."""


class _Agents:
    """All nodes, as one agent tells of them."""

    def __init__(self) -> None:
        self.jobs: dict[str, cluster_pb2.JobStart] = {}

    async def GetNode(self, _: cluster_pb2.GetNodeRequest) -> cluster_pb2.GetNodeResponse:
        slots = {str(node): count for node, count in NODES.items()}
        memory = [cluster_pb2.HostMemory(nodes=[node], total_bytes=MEMORY_BYTES) for node in NODES]
        return cluster_pb2.GetNodeResponse(
            num_slots=slots, device="cpu", slots_per_gpu=1, jobs=self.jobs.values(), host_memory=memory
        )

    async def StartJob(self, request: cluster_pb2.StartJobRequest, *, timeout: float) -> cluster_pb2.StartJobResponse:
        self.jobs[request.job] = cluster_pb2.JobStart(job=request.job, start=request.start)
        return cluster_pb2.StartJobResponse()

    async def StopJob(self, _: cluster_pb2.StopJobRequest) -> cluster_pb2.StopJobResponse:
        return cluster_pb2.StopJobResponse()


def decided(*, is_quick: bool = False) -> dict[str, Any]:
    """The milliseconds of the rounds."""
    num_queued, num_rounds = (QUICK_QUEUED, QUICK_ROUNDS) if is_quick else (QUEUED, ROUNDS)
    with TemporaryDirectory() as folder:
        took_ms = asyncio.run(_rounds(num_queued, num_rounds, Path(folder)))
    return {
        "case": f"{num_queued} jobs wait, {RUNNING} run",
        "round_p50_ms": median(took_ms),
        "round_p99_ms": quantiles(took_ms, n=100, method="inclusive")[98],
        "round_max_ms": max(took_ms),
        "rounds": num_rounds,
    }


async def _rounds(num_queued: int, num_rounds: int, folder: Path) -> list[float]:
    agents, bus, store = _Agents(), MemoryBus(), memory_store(MemoryServer())
    stub: Any = agents
    loop = ClusterLoop(store, bus.term, bus.streams, stub, KeptQueue(folder))
    await loop.open()
    config = load_sources(sources_of([_CONFIG], {})).config
    drawn, took_ms = random.Random(0), list[float]()

    async def submit(number: int, **placed: Any) -> None:
        job = JobId(f"job{number}")
        kept = await store.keep_config(job, config.model_copy(update={"job": job}).to_json())
        record = Submission(
            job, kept, Treatment.FRESH, drawn.randrange(3), number, "", (4, 4), node_bytes=JOB_BYTES, **placed
        )
        await store.write_submissions({job: record.to_json()}, expected={job: None})

    every = cluster_gpus(NODES)
    for number in range(RUNNING):
        gpus = every[8 * number : 8 * number + 8]
        await submit(number, state=SubmissionState.RUNNING, gpus=gpus, starts=1)
        agents.jobs[f"job{number}"] = cluster_pb2.JobStart(job=f"job{number}", start=1)
    for number in range(RUNNING, RUNNING + num_queued):
        await submit(number)
    for number in range(num_rounds):
        name = drawn.choice([job for job, start in agents.jobs.items() if not start.end])
        agents.jobs[name].end = "finished"
        await submit(RUNNING + num_queued + number)
        began = time.perf_counter()
        await loop.round()
        took_ms.append((time.perf_counter() - began) * 1000)
    alive = sum(not start.end for start in agents.jobs.values())
    assert alive == RUNNING, f"{alive} jobs run: each round has to place one"
    return took_ms
