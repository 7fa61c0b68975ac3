"""Every bus keeps what an open job's streams hold, and says what they do not take."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.bus_bench import (
    LIMITS,
    PATIENT_S,
    Bench,
    Open,
    a_group,
    bench,
    nats_url,
    number_of,
    numbered,
    open_bench,
    publish_groups,
    source,
)
from tidegate.adapters.nats_bus import NatsBus
from tidegate.ports.bus import JobNotOpen, MessageTooLarge, Stage, StreamFull
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import JobId

__all__ = ["bench", "nats_url", "open_bench"]


async def test_a_message_beyond_the_limit_is_refused_with_size_limit_and_remedy(bench: Bench) -> None:
    huge = a_group(bench.job, 1, num_tokens=1_000_000)
    with pytest.raises(MessageTooLarge, match=rf"is {huge.ByteSize()} bytes; .* takes \d+.*lower group_size"):
        await bench.bus.samples.publish(Stage.GENERATED, huge)


async def test_a_full_stream_refuses_and_forgets_nothing(open_bench: Open) -> None:
    bench = await open_bench(replace(LIMITS, samples_max_bytes=100_000))
    publish = [
        bench.bus.samples.publish(Stage.GENERATED, a_group(bench.job, prompt, num_tokens=3_000)) for prompt in range(10)
    ]
    outcomes = await asyncio.gather(*publish, return_exceptions=True)
    refusals = [str(outcome) for outcome in outcomes if isinstance(outcome, StreamFull)]
    stored = {prompt for prompt, outcome in enumerate(outcomes) if outcome is True}
    assert "do not fit its 100000; raise runtime.samples_max_bytes and resume" in refusals[0]
    assert 0 < len(stored) == 10 - len(refusals)
    assert await bench.bus.samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == stored


async def test_a_full_stream_of_events_names_the_key_that_helps(open_bench: Open) -> None:
    bench = await open_bench(replace(LIMITS, events_max_bytes=2_000))
    by = source()
    refused = r"stream TG_EVENTS_\S+ is full: \d+ bytes .* its 2000; raise runtime.events_max_bytes and resume"
    publish = [bench.bus.events.publish(numbered(by, bench.job, count)) for count in range(100)]
    assert 1_000 < await bench.bus.events.free_bytes(bench.job) <= 2_000
    with pytest.raises(StreamFull, match=refused):
        await asyncio.gather(*publish)
    assert await bench.bus.events.free_bytes(bench.job) < 200
    stored = [sequence async for sequence, _ in bench.bus.events.read(bench.job)]
    assert stored == list(range(1, len(stored) + 1))
    assert stored


async def test_a_job_that_was_not_opened_is_named_in_the_error(bench: Bench) -> None:
    other = JobId("never-opened")
    bus = bench.bus
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "publish an event": lambda: bus.events.publish(numbered(source(), other, 1)),
        "publish a group": lambda: bus.samples.publish(Stage.GENERATED, a_group(other, 1)),
        "consume": lambda: bus.samples.consumer(other, Stage.SCORED, "a", on_dead_letter=bench.on_dead_letter),
        "read": lambda: anext(aiter(bus.events.read(other))),
        "list dead letters": lambda: bus.dead_letters.list(other),
    }
    for call in calls.values():
        with pytest.raises(JobNotOpen, match=r"_NEVER-OPENED: .* call open_job first"):
            await call()


async def test_a_job_whose_streams_are_gone_is_not_taken_for_an_open_one(bench: Bench) -> None:
    await bench.bus.streams.require_job(bench.job)
    with pytest.raises(JobNotOpen, match="_LOST: "):
        await bench.bus.streams.require_job(JobId("lost"))


async def test_a_log_that_is_made_anew_begins_after_the_place_that_its_opener_knows(bench: Bench) -> None:
    job, log, events = JobId(f"{bench.job}-anew"), bench.bus.events, source()
    await bench.bus.streams.open_job(job, after_sequence=41)
    assert await log.publish(numbered(events, job, 1)) == 42
    await bench.bus.streams.open_job(job, after_sequence=70)
    await bench.bus.streams.open_job(job)
    assert await log.publish(numbered(events, job, 2)) == 43
    assert [sequence async for sequence, _ in log.read(job)] == [42, 43]


async def test_a_log_that_begins_anew_goes_on_after_a_place_beyond_it(bench: Bench) -> None:
    job, log, events = bench.job, bench.bus.events, source()
    consumer = await log.consumer(job, "scheduler", on_dead_letter=bench.on_dead_letter)
    for number in (1, 2, 3):
        await log.publish(numbered(events, job, number))
    first = await consumer.next(timeout_s=PATIENT_S)
    assert first is not None
    await first.ack()
    await bench.bus.streams.begin_anew(job, after_sequence=1000)
    assert [row async for row in log.read(job)] == []
    assert await log.last_sequence(job) == 1000
    assert await log.publish(numbered(events, job, 4)) == 1001
    delivery = await consumer.next(timeout_s=PATIENT_S)
    assert delivery is not None
    assert (delivery.sequence, number_of(delivery.event)) == (1001, 4)


async def test_opening_a_job_again_keeps_what_it_holds(bench: Bench) -> None:
    await publish_groups(bench, 1)
    await bench.bus.streams.open_job(bench.job)
    assert await bench.bus.samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == {1}


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "x" * 65])
async def test_a_consumer_name_that_could_reach_past_its_place_is_refused(bench: Bench, name: str) -> None:
    with pytest.raises(ValueError, match="consumer name"):
        await bench.bus.events.consumer(bench.job, name, on_dead_letter=bench.on_dead_letter)


async def test_streams_that_the_servers_disk_cannot_hold_are_refused_when_the_job_is_opened(nats_url: str) -> None:
    bus = await NatsBus.connect(nats_url, name="test", limits=replace(LIMITS, samples_max_bytes=2**60))
    with pytest.raises(StreamFull, match=rf"does not keep {2**60} bytes for stream TG_SAMPLES_VAST: .*free disk space"):
        await bus.streams.open_job(JobId("vast"))
    await bus.close()


async def test_a_job_whose_samples_take_most_of_the_disk_is_opened_again(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        # NATS takes 3/4 of what is free.
        half = shutil.disk_usage(tmp_path).free // 2
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=replace(LIMITS, samples_max_bytes=half))
        for _ in range(2):
            await bus.streams.open_job(JobId("large"))
        await bus.close()


async def test_a_removed_job_has_no_streams_and_can_be_opened_anew(bench: Bench) -> None:
    await bench.bus.events.publish(numbered(source(), bench.job, 1))
    for _ in range(2):
        await bench.bus.streams.remove_job(bench.job)
    with pytest.raises(JobNotOpen):
        await bench.bus.streams.require_job(bench.job)
    await bench.bus.streams.open_job(bench.job)
    assert [each async for each in bench.bus.events.read(bench.job)] == []
