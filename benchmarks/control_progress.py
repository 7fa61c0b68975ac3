"""Progress and backlogs of a job's instances on another node, at a rate, from a process of their own.

In a job no lead waits for the figures of all others. So the process that times commands must not publish them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized

from tidegate.config.job_config import JobConfig
from tidegate.events import EventBody, EventSource
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.service import connect_bus
from tidegate.types import JobId, NodeId, Role, instance_id
from tidegate.v1 import events_pb2

NODE = NodeId("n1")
_JOIN_TIMEOUT_S = 10.0


@contextmanager
def progress(config: JobConfig, *, per_s: float) -> Iterator[Synchronized[int]]:
    """Publishes in the job's first incarnation until it is left. The value is the number of published events."""
    spawning = multiprocessing.get_context("spawn")
    num_published: Synchronized[int] = spawning.Value("q", 0)
    process = spawning.Process(target=_run, args=(config.to_json(), per_s, num_published), daemon=True)
    process.start()
    try:
        yield num_published
    finally:
        process.kill()
        process.join(_JOIN_TIMEOUT_S)


def _run(config_json: str, per_s: float, num_published: Synchronized[int]) -> None:
    asyncio.run(_published(JobConfig.from_json(config_json), per_s, num_published))


async def _published(config: JobConfig, per_s: float, num_published: Synchronized[int]) -> None:
    bus = await connect_bus(config, name="progress")
    async with asyncio.TaskGroup() as beats:
        for role in Role:
            source = EventSource(instance_id(role, NODE), role=role, boot=1, now_ns=time.time_ns)
            announcer = Announcer(bus.events, source, JobId(config.job))
            beats.create_task(_beat(announcer, role, len(Role) / per_s, num_published))


async def _beat(announcer: Announcer, role: Role, every_s: float, num_published: Synchronized[int]) -> None:
    """Each second event of a reader is the backlog of its queue. A publish that comes late is not repeated."""
    clock = asyncio.get_running_loop()
    next_s, number = clock.time(), 0
    while True:
        number += 1
        body: EventBody = events_pb2.Progress(phase="work", num_done=number % 1000, num_total=1000)
        if number % 2 and role is not Role.ROLLOUT:
            body = events_pb2.Backlog(queue=f"{role}", num_messages=number % 100)
        await announcer.publish(body, incarnation=1)
        num_published.value += 1
        next_s = max(next_s + every_s, clock.time() - 1.0)
        await asyncio.sleep(max(0.0, next_s - clock.time()))
