"""From a structural event to its command, through the real scheduler process, NATS, Redis and gRPC.

Each case is a job of its own, whose leads (`control_leads`) are never more than one event ahead. First come iterations,
then resizes of the actor. In the case `busy` progress comes too (`control_progress`).

In `alone` and `busy` the leads take WORKS_S for each answer, far less than any component's work takes in a job. In
`back to back` they answer at once: then the leads, the servers and the scheduler share this machine's cores without a
pause, and the case tells how many commands a second there are.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from benchmarks.control_leads import Leads, Timed, leads
from benchmarks.control_progress import progress
from tests.component_bench import job_config
from tests.scheduler_process import scheduler_process
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.job import ServersSection
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import Role

PROGRESS_PER_S = 1000.0
WORKS_S = 0.05
_WARM_UP = 3
"""Iterations before the first that counts: the scheduler's first call of each lead connects to it."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sizes:
    iterations: int
    resizes: int


FULL, QUICK = Sizes(iterations=200, resizes=60), Sizes(iterations=15, resizes=6)


def config_of(folder: Path, servers: ServersSection) -> JobConfig:
    """Eight slots, and the defaults of everything that the scheduler reads. The leads publish no pictures on which a
    policy could decide."""
    return job_config(
        folder,
        cluster={"nodes": {"n0": 8}, "component_placement": {"actor": "0-1", "rollout": "2-6", "inference": "7"}},
        algorithm={"iterations": 100_000, "prompts_per_iteration": 16, "group_size": 8, "n_minibatches": 4},
        inference={"layout": {"dp": 1}},
        servers=servers.model_dump(),
    )


async def measured(name: str, folder: Path, sizes: Sizes, *, progress_per_s: float, works_s: float) -> dict[str, Any]:
    """The case's times of commands. TimeoutError where the job stands still."""
    async with AsyncExitStack() as closing, asyncio.timeout(_TIMEOUT_S):
        servers = await closing.enter_async_context(EmbeddedServers(folder / "servers"))
        section = ServersSection(nats_url=servers.nats.url, redis_url=servers.store.url)
        config = config_of(folder, section)
        scheduler = await closing.enter_async_context(scheduler_process(config))
        own = await closing.enter_async_context(leads(config, works_s=works_s))
        published = closing.enter_context(progress(config, per_s=progress_per_s)) if progress_per_s else None
        await own.until(lambda: own.num_closed >= _WARM_UP and (published is None or published.value > 0))
        # Counting begins between two iterations: commands of one that closes now have been timed already.
        num_closed = own.num_closed
        await own.until(lambda: own.num_closed > num_closed)
        return await _timed(name, own, sizes, psutil.Process(scheduler.pid), published)


async def _timed(
    name: str, own: Leads, sizes: Sizes, scheduler: psutil.Process, published: Synchronized[int] | None
) -> dict[str, Any]:
    began_s, cpu_s = time.perf_counter(), _cpu_s(scheduler)
    num_progress = published.value if published else 0
    own.timed.clear()
    until = own.num_closed + sizes.iterations
    await own.until(lambda: own.num_closed >= until)
    own.holds = True
    await own.until(lambda: own.is_open)
    gpus = own.config.placement(Role.ACTOR)
    for number in range(sizes.resizes):
        await own.resize(gpus[: 1 + number % 2])
    wall_s, used_s = time.perf_counter() - began_s, _cpu_s(scheduler) - cpu_s
    return {
        "case": name,
        **_spread(own.timed),
        "progress_per_s": ((published.value if published else 0) - num_progress) / wall_s,
        "commands_per_s": len(own.timed) / wall_s,
        "cpu_ms_per_command": 1000 * used_s / len(own.timed),
        "cpu_share": used_s / wall_s,
        "commands": {command: _spread([each for each in own.timed if each.command == command]) for command in _KINDS},
    }


_KINDS = ("LoadWeights", "OpenIteration", "CloseIteration", "ScaleDown", "ScaleUp")


def _spread(timed: list[Timed]) -> dict[str, float]:
    took = sorted(each.took_ms for each in timed)
    p99 = quantiles(took, n=100, method="inclusive")[98] if len(took) > 1 else took[0]
    return {"num_commands": len(took), "p50_ms": median(took), "p99_ms": p99, "max_ms": took[-1]}


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system
