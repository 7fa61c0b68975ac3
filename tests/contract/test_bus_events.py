"""Every bus keeps a job's events in one order, repeats none, and keeps the last of each figure."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tests.contract.bus_bench import (
    COMES_AGAIN,
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
from tidegate.codec import WireError
from tidegate.events import EventSource
from tidegate.types import JobId, Role
from tidegate.v1 import events_pb2

__all__ = ["bench", "nats_url", "open_bench"]


def figure(events: EventSource, job: JobId, num_done: int, *, iteration: int = 0) -> events_pb2.Event:
    body = events_pb2.Progress(phase="generate", num_done=num_done)
    return events.event(body, job=job, incarnation=1, iteration=iteration)


async def test_a_repeated_event_is_stored_once_and_answered_with_its_own_sequence(bench: Bench) -> None:
    events = source()
    first, second = numbered(events, bench.job, 1), numbered(events, bench.job, 2)
    sequences = [await bench.bus.events.publish(event) for event in (first, second, first)]
    assert sequences == [1, 2, 1]
    assert [event.id async for _, event in bench.bus.events.read(bench.job)] == [first.id, second.id]


async def test_reading_the_log_gives_events_in_order_and_consumes_nothing(bench: Bench) -> None:
    events = source()
    for count in range(300):
        await bench.bus.events.publish(numbered(events, bench.job, count))
    want = list(range(300))
    for _ in range(2):
        assert [number_of(event) async for _, event in bench.bus.events.read(bench.job)] == want
    later = [sequence async for sequence, _ in bench.bus.events.read(bench.job, after_sequence=297)]
    assert later == [298, 299, 300]


async def test_a_follower_of_the_log_sees_what_is_published_later(bench: Bench) -> None:
    events = source()
    await bench.bus.events.publish(numbered(events, bench.job, 1))
    seen: list[int] = []
    async with aclosing(bench.bus.events.read(bench.job, follow=True)) as log, asyncio.timeout(PATIENT_S):
        async for _, event in log:
            seen.append(number_of(event))
            if len(seen) == 3:
                break
            await bench.bus.events.publish(numbered(events, bench.job, len(seen) + 1))
    assert seen == [1, 2, 3]


async def test_a_consumer_has_one_event_in_flight_and_gets_them_in_order(bench: Bench) -> None:
    events = source()
    for count in (1, 2):
        await bench.bus.events.publish(numbered(events, bench.job, count))
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    first = await consumer.next(timeout_s=PATIENT_S)
    assert first is not None
    assert (first.sequence, number_of(first.event)) == (1, 1)
    assert await consumer.next(timeout_s=SOON_S) is None
    await first.ack()
    second = await consumer.next(timeout_s=PATIENT_S)
    assert second is not None
    assert (second.sequence, number_of(second.event)) == (2, 2)


async def test_without_a_time_to_wait_a_consumer_takes_what_is_there(bench: Bench) -> None:
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    assert await consumer.next(timeout_s=0.0) is None
    await bench.bus.events.publish(numbered(source(), bench.job, 1))
    # A server may store an event a moment before a consumer can take it.
    while (taken := await consumer.next(timeout_s=0.0)) is None:
        pass
    assert number_of(taken.event) == 1


async def test_an_event_handed_back_comes_again_before_later_ones(bench: Bench) -> None:
    events = source()
    for count in (1, 2):
        await bench.bus.events.publish(numbered(events, bench.job, count))
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    seen = []
    for _ in range(4):
        delivery = await consumer.next(timeout_s=PATIENT_S)
        assert delivery is not None
        seen.append(delivery.sequence)
        await (delivery.nak() if len(seen) in (1, 2) else delivery.ack())
    assert seen == [1, 1, 1, 2]


async def test_an_event_its_holder_never_settles_comes_to_the_next_holder_of_the_name(open_bench: Open) -> None:
    bench = await open_bench(COMES_AGAIN)
    await bench.bus.events.publish(numbered(source(), bench.job, 1))
    dies = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    assert await dies.next(timeout_s=PATIENT_S) is not None
    takes_over = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    again = await takes_over.next(timeout_s=PATIENT_S)
    assert again is not None
    assert again.sequence == 1


async def test_an_event_is_never_dead_lettered_for_being_handed_back_often(bench: Bench) -> None:
    await bench.bus.events.publish(numbered(source(), bench.job, 1))
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    for _ in range(LIMITS.max_deliveries + 3):
        delivery = await consumer.next(timeout_s=PATIENT_S)
        assert delivery is not None
        await delivery.nak()
    assert bench.dead_letters == []


async def test_a_figure_is_replaced_by_the_next_one_of_its_source_and_iteration(bench: Bench) -> None:
    rollout, actor = source(), EventSource("actor@n0", role=Role.ACTOR, boot=1, now_ns=lambda: 1)
    await bench.bus.events.publish(figure(rollout, bench.job, 1))
    await bench.bus.events.publish(numbered(rollout, bench.job, 100))
    await bench.bus.events.publish(figure(actor, bench.job, 2))
    await bench.bus.events.publish(figure(rollout, bench.job, 3, iteration=1))
    for count in range(4, 50):
        last = figure(rollout, bench.job, count)
        sequence = await bench.bus.events.publish(last)
    assert await bench.bus.events.publish(last) == sequence == 50, "a repeat is stored once"
    found = [(sequence, number_of(event)) async for sequence, event in bench.bus.events.read(bench.job)]
    assert found == [(2, 100), (3, 2), (4, 3), (50, 49)]


async def test_a_consumer_gets_no_figures_and_a_page_has_them_in_their_order(bench: Bench) -> None:
    events = source()
    await bench.bus.events.publish(figure(events, bench.job, 1))
    await bench.bus.events.publish(numbered(events, bench.job, 2))
    await bench.publish_raw(subjects.event_subject(bench.job), b"no event")
    await bench.bus.events.publish(figure(events, bench.job, 4))
    await bench.bus.events.publish(numbered(events, bench.job, 5))
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    first = await consumer.next(timeout_s=PATIENT_S)
    assert first is not None
    assert (first.sequence, number_of(first.event)) == (2, 2)
    page = await bench.bus.events.page(bench.job, after_sequence=0)
    assert [(sequence, number_of(event)) for sequence, event in page] == [(2, 2), (4, 4), (5, 5)]
    assert await bench.bus.events.page(bench.job, after_sequence=5) == []
    await first.ack()
    second = await consumer.next(timeout_s=PATIENT_S)
    assert second is not None
    assert second.sequence == 5, "a page consumes nothing"


async def test_a_consumer_says_until_which_event_all_are_acknowledged(bench: Bench) -> None:
    events = source()
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    assert await consumer.acknowledged() == 0
    for count in (1, 2):
        await bench.bus.events.publish(numbered(events, bench.job, count))
        await bench.bus.events.publish(figure(events, bench.job, count))
    for acknowledged in (0, 1):
        delivery = await consumer.next(timeout_s=PATIENT_S)
        assert delivery is not None
        assert await consumer.acknowledged() == acknowledged
        await delivery.ack()
    other = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    assert await other.acknowledged() == 3


async def test_a_figure_of_a_name_that_is_no_part_of_a_subject_stays_like_any_event(bench: Bench) -> None:
    events = EventSource("rollout@n0.*", role=Role.ROLLOUT, boot=1, now_ns=lambda: 1)
    for count in (1, 2):
        await bench.bus.events.publish(figure(events, bench.job, count))
    assert [number_of(event) async for _, event in bench.bus.events.read(bench.job)] == [1, 2]


async def test_a_follower_of_the_log_hears_of_figures_too(bench: Bench) -> None:
    events = source()
    seen: list[int] = []
    await bench.bus.events.publish(figure(events, bench.job, 1))
    async with aclosing(bench.bus.events.read(bench.job, follow=True)) as log, asyncio.timeout(PATIENT_S):
        async for _, event in log:
            seen.append(number_of(event))
            if len(seen) == 3:
                break
            await bench.bus.events.publish(figure(events, bench.job, len(seen) + 1))
    assert seen == [1, 2, 3]


async def test_an_event_without_a_body_is_refused_before_it_is_sent(bench: Bench) -> None:
    empty = numbered(source(), bench.job, 1)
    empty.ClearField("failed")
    with pytest.raises(WireError, match=r"Event\.body is missing"):
        await bench.bus.events.publish(empty)
    assert [event async for _, event in bench.bus.events.read(bench.job)] == []
