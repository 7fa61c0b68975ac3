"""Every bus keeps one copy of a job's state in its log, and drops only events that the copy holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract.bus_bench import (
    LIMITS,
    PATIENT_S,
    SOON_S,
    Bench,
    Open,
    bench,
    nats_url,
    number_of,
    numbered,
    open_bench,
    source,
)
from tidegate.adapters import subjects
from tidegate.ports.bus import JobNotOpen, StateCopy
from tidegate.types import JobId

__all__ = ["bench", "nats_url", "open_bench"]

FEW = replace(LIMITS, kept_events=8)


async def publish(bench: Bench, first: int, last: int) -> None:
    events = source(boot=first)
    for number in range(first, last + 1):
        await bench.bus.events.publish(numbered(events, bench.job, number))


async def stored(bench: Bench) -> list[int]:
    return [number_of(event) async for _, event in bench.bus.events.read(bench.job)]


async def test_a_copy_replaces_the_one_before_and_is_no_event(bench: Bench) -> None:
    assert await bench.bus.copies.newest(bench.job) is None
    await publish(bench, 1, 1)
    await bench.bus.copies.keep(bench.job, StateCopy(through=1, state=b"first"))
    await publish(bench, 2, 2)
    await bench.bus.copies.keep(bench.job, StateCopy(through=3, state=b"second"))
    await publish(bench, 3, 3)
    assert await bench.bus.copies.newest(bench.job) == StateCopy(through=3, state=b"second")
    assert await stored(bench) == [1, 2, 3]
    assert [number_of(event) for _, event in await bench.bus.events.page(bench.job, after_sequence=0)] == [1, 2, 3]
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    for want in (1, 2, 3):
        delivery = await consumer.next(timeout_s=PATIENT_S)
        assert delivery is not None
        assert number_of(delivery.event) == want
        await delivery.ack()
    assert await consumer.next(timeout_s=SOON_S) is None
    assert bench.dead_letters == []


@pytest.mark.parametrize(
    ("through", "until", "want_first"),
    [
        pytest.param(20, 20, 14, id="up to the newest that stay"),
        pytest.param(5, 20, 6, id="up to what the copy holds"),
        pytest.param(20, 3, 4, id="up to what the caller has"),
        pytest.param(None, 20, 1, id="none without a copy"),
    ],
)
async def test_only_events_that_the_copy_holds_are_dropped(
    open_bench: Open, through: int | None, until: int, want_first: int
) -> None:
    bench = await open_bench(FEW)
    await publish(bench, 1, 20)
    copy = None if through is None else StateCopy(through, b"state")
    if copy is not None:
        await bench.bus.copies.keep(bench.job, copy)
    await bench.bus.copies.drop_events(bench.job, until=until)
    assert await stored(bench) == list(range(want_first, 21))
    assert await bench.bus.copies.newest(bench.job) == copy


@pytest.mark.parametrize("payload", [b"", b"garbage", bytes(100)], ids=["nothing", "a few bytes", "zeros"])
async def test_what_a_stranger_publishes_in_a_copys_place_is_no_copy(open_bench: Open, payload: bytes) -> None:
    bench = await open_bench(FEW)
    await publish(bench, 1, 20)
    await bench.publish_raw(subjects.copy_subject(bench.job), payload)
    assert await bench.bus.copies.newest(bench.job) is None
    await bench.bus.copies.drop_events(bench.job, until=20)
    assert await stored(bench) == list(range(1, 21))
    await bench.bus.copies.keep(bench.job, StateCopy(20, b"state"))
    assert await bench.bus.copies.newest(bench.job) == StateCopy(20, b"state")


async def test_few_events_are_not_dropped_one_by_one(open_bench: Open) -> None:
    bench = await open_bench(FEW)
    await publish(bench, 1, 9)
    await bench.bus.copies.keep(bench.job, StateCopy(9, b"state"))
    await bench.bus.copies.drop_events(bench.job, until=9)
    assert await stored(bench) == list(range(1, 10))


async def test_a_consumer_goes_on_after_events_that_it_had_settled_were_dropped(open_bench: Open) -> None:
    bench = await open_bench(FEW)
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    await publish(bench, 1, 20)
    for want in range(1, 21):
        delivery = await consumer.next(timeout_s=PATIENT_S)
        assert delivery is not None
        assert delivery.sequence == want
        await delivery.ack()
    await bench.bus.copies.keep(bench.job, StateCopy(20, b"state"))
    await bench.bus.copies.drop_events(bench.job, until=20)
    await publish(bench, 21, 21)
    delivery = await consumer.next(timeout_s=PATIENT_S)
    assert delivery is not None
    assert number_of(delivery.event) == 21
    assert await consumer.acknowledged() == 20


async def test_a_job_that_was_not_opened_has_no_copies(bench: Bench) -> None:
    other = JobId("never-opened")
    for call in (
        bench.bus.copies.keep(other, StateCopy(1, b"")),
        bench.bus.copies.newest(other),
        bench.bus.copies.drop_events(other, until=1),
    ):
        with pytest.raises(JobNotOpen):
            await call
