"""Every bus tells of single responses, which nothing stores, to those who listen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.bus_bench import LIMITS, PATIENT_S, SOON_S, Bench, a_group, bench, nats_url, open_bench
from tidegate.adapters import subjects
from tidegate.adapters.nats_bus import NatsBus
from tidegate.codec import WireError
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import JobId
from tidegate.v1 import samples_pb2

__all__ = ["bench", "nats_url", "open_bench"]


def a_response(job: JobId, prompt: int, *, num_tokens: int = 1) -> samples_pb2.SampleGroup:
    group = a_group(job, prompt)
    sample = samples_pb2.Sample(id=group.samples[0].id, response_tokens=[7] * num_tokens)
    del group.samples[:]
    group.samples.append(sample)
    return group


async def test_a_response_that_is_told_reaches_those_who_listen_and_no_others(bench: Bench) -> None:
    samples = bench.bus.samples
    first, second, other = (a_response(bench.job, prompt) for prompt in (1, 2, 3))
    other.job = "another-job"
    await samples.tell_response(first)  # nobody listens
    async with samples.responses(bench.job) as one, samples.responses(bench.job) as two:
        for told in (other, second, first):
            await samples.tell_response(told)
        async with asyncio.timeout(PATIENT_S):
            assert [[await anext(feed), await anext(feed)] for feed in (one, two)] == [[second, first]] * 2
    for feed in (one, two):
        assert [response async for response in feed] == [], "the feed has ended"


async def test_a_feed_ends_for_a_task_that_waits_for_its_next_response(bench: Bench) -> None:
    waits = asyncio.Event()

    async def wait(feed: AsyncIterator[samples_pb2.SampleGroup]) -> samples_pb2.SampleGroup | None:
        waits.set()
        return await anext(feed, None)

    async with asyncio.timeout(PATIENT_S), bench.bus.samples.responses(bench.job) as feed:
        waiting = asyncio.create_task(wait(feed))
        await waits.wait()
    async with asyncio.timeout(PATIENT_S):
        assert await waiting is None


async def test_a_told_message_that_is_no_response_is_left_out(bench: Bench) -> None:
    samples, subject = bench.bus.samples, subjects.responses_subject(bench.job)
    two = a_response(bench.job, 1)
    two.samples.append(two.samples[0])
    async with samples.responses(bench.job) as feed, asyncio.timeout(PATIENT_S):
        # The subscription is in place once a response has come.
        await samples.tell_response(a_response(bench.job, 2))
        assert (await anext(feed)).prompt == 2
        for poison in (b"\xff\xff", two.SerializeToString(), a_response(JobId("other"), 1).SerializeToString()):
            await bench.publish_raw(subject, poison)
        await samples.tell_response(a_response(bench.job, 3))
        assert (await anext(feed)).prompt == 3
    assert bench.dead_letters == []
    with pytest.raises(WireError, match="2 samples"):
        await samples.tell_response(two)


async def test_a_response_too_large_for_the_bus_is_not_told(bench: Bench) -> None:
    samples = bench.bus.samples
    async with samples.responses(bench.job) as feed, asyncio.timeout(PATIENT_S):
        await samples.tell_response(a_response(bench.job, 1, num_tokens=9 * 2**20))
        await samples.tell_response(a_response(bench.job, 2))
        assert (await anext(feed)).prompt == 2


async def test_a_burst_of_responses_reaches_a_listener_that_is_busy(bench: Bench) -> None:
    samples, num = bench.bus.samples, 10_000
    async with samples.responses(bench.job) as feed, asyncio.timeout(PATIENT_S):
        for prompt in range(num):
            await samples.tell_response(a_response(bench.job, prompt))
        assert [(await anext(feed)).prompt for _ in range(num)] == list(range(num))


async def test_to_tell_a_response_waits_for_no_server(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=LIMITS)
        job = JobId("untold")
        await servers.nats.stop()
        async with asyncio.timeout(SOON_S):
            for prompt in range(100):
                await bus.samples.tell_response(a_response(job, prompt, num_tokens=2**16))
        await bus.close()
