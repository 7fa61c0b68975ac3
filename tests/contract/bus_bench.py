"""A bus in memory and one on a real nats-server, each with an open job: the bench of `tidegate.ports.bus`.

A test module imports the fixtures, and names them in `__all__`. A wait is always one of the bus's own calls with its
timeout; in memory the clock moves instead of time passing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

import nats
import pytest

from tidegate.adapters import subjects
from tidegate.adapters.memory_bus import MemoryBus
from tidegate.adapters.nats_bus import NatsBus
from tidegate.events import EventSource, body_of
from tidegate.ports.bus import BusLimits, DeadLetter, Stage
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import JobId, Role
from tidegate.v1 import events_pb2, samples_pb2, types_pb2

# A call that must find nothing waits this long; a call that must find something waits up to PATIENT_S.
SOON_S = 0.2
PATIENT_S = 60.0
LIMITS = BusLimits(
    event_ack_wait_s=90.0,
    sample_ack_wait_s=90.0,
    max_deliveries=2,
    events_max_bytes=2**20,
    samples_max_bytes=16 * 2**20,
    dead_max_bytes=2**20,
    deadline_s=30.0,
)
# Of tests that wait until a message comes again. In others it would come again where the machine was busy for a second.
COMES_AGAIN = replace(LIMITS, event_ack_wait_s=1.0, sample_ack_wait_s=1.0)
JOBS = itertools.count(1)


@dataclass
class Bench:
    """One bus with an open job, and the actions that only tests need."""

    bus: MemoryBus | NatsBus
    job: JobId
    publish_raw: Callable[[str, bytes], Awaitable[None]]
    dead_letters: list[DeadLetter]

    async def on_dead_letter(self, letter: DeadLetter) -> None:
        self.dead_letters.append(letter)


Open = Callable[[BusLimits], Awaitable[Bench]]


class MovingClock:
    """A clock that sleepers move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    servers = EmbeddedServers(tmp_path_factory.mktemp("servers"))
    with asyncio.Runner() as runner:
        runner.run(servers.start())
        yield servers.nats.url
        runner.run(servers.stop())


@pytest.fixture(params=["memory", "nats"])
async def open_bench(request: pytest.FixtureRequest, nats_url: str) -> AsyncIterator[Open]:
    buses: list[MemoryBus | NatsBus] = []

    async def in_memory(limits: BusLimits) -> Bench:
        clock = MovingClock()
        bus = MemoryBus(limits, now=clock.now, sleep=clock.sleep)
        job = JobId(f"job-{next(JOBS)}")
        await bus.streams.open_job(job)

        async def publish_raw(subject: str, payload: bytes) -> None:
            bus.publish_raw(job, subject, payload)

        return Bench(bus, job, publish_raw, [])

    async def on_nats(limits: BusLimits) -> Bench:
        bus = await NatsBus.connect(nats_url, name="test", limits=limits)
        buses.append(bus)
        job = JobId(f"job-{next(JOBS)}")
        await bus.streams.open_job(job)

        async def publish_raw(subject: str, payload: bytes) -> None:
            foreign = await nats.connect(nats_url)
            if subject == subjects.responses_subject(job):
                await foreign.publish(subject, payload)
                await foreign.flush()
            else:
                await foreign.jetstream().publish(subject, payload)
            await foreign.close()

        return Bench(bus, job, publish_raw, [])

    yield {"memory": in_memory, "nats": on_nats}[request.param]
    for bus in buses:
        await bus.close()


@pytest.fixture
async def bench(open_bench: Open) -> Bench:
    return await open_bench(LIMITS)


def source(boot: int = 1) -> EventSource:
    return EventSource("rollout@n0", role=Role.ROLLOUT, boot=boot, now_ns=lambda: 1)


def numbered(events: EventSource, job: JobId, number: int) -> events_pb2.Event:
    return events.event(events_pb2.Failed(exit_status=number), job=job, incarnation=1)


def number_of(event: events_pb2.Event) -> int:
    body = body_of(event)
    assert isinstance(body, events_pb2.Failed | events_pb2.Progress)
    return body.exit_status if isinstance(body, events_pb2.Failed) else body.num_done


def a_group(
    job: JobId, prompt: int, *, incarnation: int = 1, iteration: int = 0, num_tokens: int = 3
) -> samples_pb2.SampleGroup:
    sample = samples_pb2.Sample(
        id=types_pb2.SampleId(incarnation=incarnation, iteration=iteration, prompt=prompt, draw=0),
        response_tokens=[7] * num_tokens,
        engine_log_probs=[-1.0] * num_tokens,
        versions=[samples_pb2.VersionRun(version=1, num_tokens=num_tokens)],
        finish=samples_pb2.FINISH_REASON_STOP,
        old_log_probs=[-1.0] * num_tokens,
    )
    return samples_pb2.SampleGroup(
        job=job,
        incarnation=incarnation,
        iteration=iteration,
        prompt=prompt,
        version=1,
        prompt_tokens=[1, 2],
        samples=[sample],
    )


async def publish_groups(bench: Bench, *prompts: int) -> None:
    for prompt in prompts:
        await bench.bus.samples.publish(Stage.GENERATED, a_group(bench.job, prompt))
