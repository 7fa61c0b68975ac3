"""What every bus promises (`tidegate.ports.bus`), asked of the one in memory and of a real nats-server.

A wait is always one of the bus's own calls with its timeout; in memory the clock moves instead of time passing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import nats
import pytest

from tidegate.adapters import subjects
from tidegate.adapters.memory_bus import MemoryBus
from tidegate.adapters.nats_bus import NatsBus
from tidegate.codec import WireError
from tidegate.events import EventSource, body_of
from tidegate.ports.bus import (
    BusLimits,
    BusUnavailable,
    DeadLetter,
    JobNotOpen,
    MessageTooLarge,
    Stage,
    StaleTerm,
    StreamFull,
    UnknownDeadLetter,
)
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import JobId, Role
from tidegate.v1 import events_pb2, samples_pb2, types_pb2

# A call that must find nothing waits this long; a call that must find something waits up to PATIENT_S.
SOON_S = 0.2
PATIENT_S = 10.0
LIMITS = BusLimits(
    event_ack_wait_s=1.0,
    sample_ack_wait_s=1.0,
    max_deliveries=2,
    events_max_bytes=2**20,
    samples_max_bytes=16 * 2**20,
    dead_max_bytes=2**20,
    deadline_s=5.0,
)
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


async def no_raw_messages(subject: str, payload: bytes) -> None:
    raise AssertionError(f"{subject}: this bench publishes groups only")


def source(boot: int = 1) -> EventSource:
    return EventSource("rollout@n0", role=Role.ROLLOUT, boot=boot, now_ns=lambda: 1)


def numbered(events: EventSource, job: JobId, number: int) -> events_pb2.Event:
    return events.event(events_pb2.Failed(exit_status=number), job=job, incarnation=1)


def number_of(event: events_pb2.Event) -> int:
    body = body_of(event)
    assert isinstance(body, events_pb2.Failed | events_pb2.Progress)
    return body.exit_status if isinstance(body, events_pb2.Failed) else body.num_done


def figure(events: EventSource, job: JobId, num_done: int, *, iteration: int = 0) -> events_pb2.Event:
    body = events_pb2.Progress(phase="generate", num_done=num_done)
    return events.event(body, job=job, incarnation=1, iteration=iteration)


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
    taken = await consumer.next(timeout_s=0.0)
    assert taken is not None
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


async def test_an_event_its_holder_never_settles_comes_to_the_next_holder_of_the_name(bench: Bench) -> None:
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


async def test_a_consumer_that_fell_behind_gets_the_last_figure_only_and_every_other_event(bench: Bench) -> None:
    events = source()
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    await bench.bus.events.publish(figure(events, bench.job, 1))
    in_flight = await consumer.next(timeout_s=PATIENT_S)
    assert in_flight is not None
    for count in (2, 3):
        await bench.bus.events.publish(numbered(events, bench.job, count * 10))
        await bench.bus.events.publish(figure(events, bench.job, count))
    await in_flight.ack()
    seen: list[int] = []
    while (delivery := await consumer.next(timeout_s=PATIENT_S if len(seen) < 3 else SOON_S)) is not None:
        seen.append(number_of(delivery.event))
        await delivery.ack()
    assert seen == [20, 30, 3]


async def test_a_delivery_names_the_one_before_it_where_this_client_got_that(bench: Bench) -> None:
    events = source()
    one, other = [
        await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter) for _ in range(2)
    ]
    for count in (1, 2, 3):
        await bench.bus.events.publish(numbered(events, bench.job, count))
    for count in (4, 5):
        await bench.bus.events.publish(figure(events, bench.job, count))
    await bench.bus.events.publish(numbered(events, bench.job, 6))
    found = []
    for consumer in (one, one, other, one, one):
        delivery = await consumer.next(timeout_s=PATIENT_S)
        assert delivery is not None
        found.append((delivery.sequence, delivery.follows))
        await delivery.ack()
    assert found == [(1, None), (2, 1), (3, None), (5, None), (6, 5)]


async def test_a_delivery_counts_the_events_behind_it_and_a_page_has_them(bench: Bench) -> None:
    events = source()
    for count in (1, 2, 3):
        await bench.bus.events.publish(numbered(events, bench.job, count))
    await bench.publish_raw(subjects.event_subject(bench.job), b"no event")
    await bench.bus.events.publish(figure(events, bench.job, 4))
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    first = await consumer.next(timeout_s=PATIENT_S)
    assert first is not None
    assert (first.sequence, first.num_waiting) == (1, 4)
    page = await bench.bus.events.page(bench.job, after_sequence=1)
    assert [(sequence, number_of(event)) for sequence, event in page] == [(2, 2), (3, 3), (5, 4)]
    assert await bench.bus.events.page(bench.job, after_sequence=5) == []
    await first.ack()
    second = await consumer.next(timeout_s=PATIENT_S)
    assert second is not None
    assert second.sequence == 2, "a page consumes nothing"


async def test_a_figure_replaced_while_it_was_in_flight_does_not_come_again(bench: Bench) -> None:
    events = source()
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    await bench.bus.events.publish(figure(events, bench.job, 1))
    assert await consumer.next(timeout_s=PATIENT_S) is not None, "its holder dies without settling it"
    await bench.bus.events.publish(figure(events, bench.job, 2))
    later = await consumer.next(timeout_s=PATIENT_S)
    assert later is not None
    assert number_of(later.event) == 2


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


async def test_a_group_is_stored_once_however_often_it_is_published(bench: Bench) -> None:
    group = a_group(bench.job, 5)
    stored = [await bench.bus.samples.publish(Stage.GENERATED, group) for _ in range(3)]
    assert stored == [True, False, False]
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (delivery,) = await consumer.fetch(10, timeout_s=PATIENT_S)
    assert delivery.group == group
    await delivery.ack()
    assert await bench.bus.samples.publish(Stage.GENERATED, group) is False
    assert await consumer.fetch(10, timeout_s=SOON_S) == []


async def test_a_group_that_the_stream_holds_can_be_looked_at_acknowledged_or_not(bench: Bench) -> None:
    samples = bench.bus.samples
    await publish_groups(bench, 3, 1)
    consumer = await samples.consumer(bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter)
    for delivery in await consumer.fetch(1, timeout_s=PATIENT_S):
        await delivery.ack()
    place = {"incarnation": 1, "iteration": 0}
    for prompt in (1, 3):
        assert await samples.stored_group(bench.job, Stage.GENERATED, **place, prompt=prompt) == a_group(
            bench.job, prompt
        )
    for stage, prompt in ((Stage.GENERATED, 2), (Stage.SCORED, 3)):
        assert await samples.stored_group(bench.job, stage, **place, prompt=prompt) is None
    with pytest.raises(JobNotOpen):
        await samples.stored_group(JobId("nobody"), Stage.GENERATED, **place, prompt=1)


async def test_the_published_prompts_of_an_iteration_are_exactly_its_groups_acknowledged_or_not(bench: Bench) -> None:
    samples = bench.bus.samples
    await publish_groups(bench, 3, 1)
    await samples.publish(Stage.GENERATED, a_group(bench.job, 4, iteration=1))
    await samples.publish(Stage.GENERATED, a_group(bench.job, 6, incarnation=2))
    await samples.publish(Stage.SCORED, a_group(bench.job, 7))
    consumer = await samples.consumer(bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter)
    for delivery in await consumer.fetch(10, timeout_s=PATIENT_S):
        await delivery.ack()
    got = {
        (stage, incarnation, iteration): await samples.published(
            bench.job, stage, incarnation=incarnation, iteration=iteration
        )
        for stage, incarnation, iteration in itertools.product(Stage, (1, 2), (0, 1))
    }
    want = {key: frozenset[int]() for key in got} | {
        (Stage.GENERATED, 1, 0): frozenset({1, 3}),
        (Stage.GENERATED, 1, 1): frozenset({4}),
        (Stage.GENERATED, 2, 0): frozenset({6}),
        (Stage.SCORED, 1, 0): frozenset({7}),
    }
    assert got == want


async def test_a_fetch_takes_what_is_there_in_order_and_no_more_than_asked_for(bench: Bench) -> None:
    await publish_groups(bench, *range(5))
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    fetched = [[delivery.group.prompt for delivery in await consumer.fetch(3, timeout_s=PATIENT_S)] for _ in range(2)]
    assert fetched == [[0, 1, 2], [3, 4]]
    assert await consumer.num_waiting() == 5


async def test_only_settled_groups_leave_the_backlog(bench: Bench) -> None:
    await publish_groups(bench, 0, 1, 2)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    deliveries = await consumer.fetch(2, timeout_s=PATIENT_S)
    assert await consumer.num_waiting() == 3
    for delivery in deliveries:
        await delivery.ack()
    assert await consumer.num_waiting() == 1


async def test_two_stages_have_consumers_of_their_own(bench: Bench) -> None:
    await bench.bus.samples.publish(Stage.SCORED, a_group(bench.job, 1))
    inference = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    actor = await bench.bus.samples.consumer(bench.job, Stage.SCORED, "actor", on_dead_letter=bench.on_dead_letter)
    assert [delivery.group.prompt for delivery in await actor.fetch(10, timeout_s=PATIENT_S)] == [1]
    assert await inference.fetch(10, timeout_s=SOON_S) == []


async def test_a_group_without_its_old_log_probabilities_is_not_let_into_the_scored_stage(bench: Bench) -> None:
    group = a_group(bench.job, 1)
    second = group.samples.add()
    second.CopyFrom(group.samples[0])
    second.id.draw = 1
    del second.old_log_probs[:]
    with pytest.raises(WireError, match=r"Sample\.old_log_probs is missing"):
        await bench.bus.samples.publish(Stage.SCORED, group)
    del group.samples[0].old_log_probs[:]
    second.reward = 1.0
    with pytest.raises(WireError, match=r"Sample\.old_log_probs is missing"):
        await bench.bus.samples.publish(Stage.SCORED, group)
    assert await bench.bus.samples.publish(Stage.GENERATED, group) is True


async def test_a_group_that_is_dropped_for_its_equal_rewards_needs_no_log_probabilities(bench: Bench) -> None:
    group = a_group(bench.job, 1)
    del group.samples[0].old_log_probs[:]
    assert await bench.bus.samples.publish(Stage.SCORED, group) is True
    actor = await bench.bus.samples.consumer(bench.job, Stage.SCORED, "actor", on_dead_letter=bench.on_dead_letter)
    (delivery,) = await actor.fetch(1, timeout_s=PATIENT_S)
    assert delivery.group == group


async def test_an_unsettled_group_is_delivered_again_and_counts_its_deliveries(bench: Bench) -> None:
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (first,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    (second,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    assert [first.num_deliveries, second.num_deliveries] == [1, 2]
    await first.ack()  # late, by whoever had it first: it counts
    assert await consumer.num_waiting() == 0


async def test_a_group_in_progress_does_not_come_again(bench: Bench) -> None:
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (held,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    for _ in range(3):
        await held.in_progress()
        assert await consumer.fetch(1, timeout_s=0.5 * LIMITS.sample_ack_wait_s) == []
    (again,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    assert again.num_deliveries == 2


async def test_a_group_handed_back_with_a_delay_comes_after_it_and_others_before(bench: Bench) -> None:
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (first,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    await first.nak(delay_s=0.6)
    assert await consumer.fetch(1, timeout_s=0.0) == []
    await publish_groups(bench, 2)
    order = [delivery.group.prompt for _ in range(2) for delivery in await consumer.fetch(1, timeout_s=PATIENT_S)]
    assert order == [2, 1]


async def test_settling_a_group_twice_or_after_a_purge_is_harmless(bench: Bench) -> None:
    await publish_groups(bench, 1, 2)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    first, second = await consumer.fetch(2, timeout_s=PATIENT_S)
    await first.ack()
    await first.ack()
    await first.nak()
    await bench.bus.samples.purge(bench.job, incarnation=1, iteration=1)
    await second.ack()
    assert await consumer.fetch(2, timeout_s=SOON_S) == []


async def test_an_undecodable_group_becomes_a_dead_letter_and_holds_nobody_up(bench: Bench) -> None:
    poison = {
        "no message": (f"tg.samples.{bench.job}.generated.1.0.8", b"\xff\xff", "SampleGroup: 2 bytes"),
        "on another's subject": (
            f"tg.samples.{bench.job}.generated.1.0.9",
            a_group(bench.job, 1).SerializeToString(),
            "does not belong on subject",
        ),
        "without samples": (
            f"tg.samples.{bench.job}.generated.1.0.10",
            samples_pb2.SampleGroup(job=bench.job, prompt_tokens=[1]).SerializeToString(),
            "SampleGroup.samples is missing",
        ),
    }
    for subject, payload, _ in poison.values():
        await bench.publish_raw(subject, payload)
    await publish_groups(bench, 2)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    assert [delivery.group.prompt for delivery in await consumer.fetch(10, timeout_s=PATIENT_S)] == [2]
    letters = await bench.bus.dead_letters.list(bench.job)
    assert letters == bench.dead_letters
    assert [(letter.subject, letter.size_bytes) for letter in letters] == [
        (subject, len(payload)) for subject, payload, _ in poison.values()
    ]
    for letter, (_, _, want) in zip(letters, poison.values(), strict=True):
        assert want in letter.reason


async def test_an_undecodable_event_becomes_a_dead_letter_and_the_next_one_is_delivered(bench: Bench) -> None:
    await bench.publish_raw(f"tg.events.{bench.job}", b"\xff\xff")
    await bench.bus.events.publish(numbered(source(), bench.job, 1))
    consumer = await bench.bus.events.consumer(bench.job, "scheduler", on_dead_letter=bench.on_dead_letter)
    delivery = await consumer.next(timeout_s=PATIENT_S)
    assert delivery is not None
    assert delivery.sequence == 2
    assert [letter.subject for letter in bench.dead_letters] == [f"tg.events.{bench.job}"]
    assert [number_of(event) async for _, event in bench.bus.events.read(bench.job)] == [1]


async def test_a_group_delivered_too_often_becomes_a_dead_letter_that_says_so(bench: Bench) -> None:
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    for _ in range(LIMITS.max_deliveries):
        (delivery,) = await consumer.fetch(1, timeout_s=PATIENT_S)
        await delivery.nak()
    assert await consumer.fetch(1, timeout_s=SOON_S) == []
    assert [letter.reason for letter in bench.dead_letters] == [
        "delivered 2 times and never acknowledged; see what its consumer logged"
    ]
    assert await consumer.num_waiting() == 0


async def test_a_replayed_dead_letter_is_delivered_again_as_if_new(bench: Bench) -> None:
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (delivery,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    await delivery.dead_letter("reward: no such task\n'größer'")
    assert await consumer.fetch(1, timeout_s=SOON_S) == []
    (letter,) = await bench.bus.dead_letters.list(bench.job)
    assert letter == bench.dead_letters[0]
    assert letter.reason == "reward: no such task\n'größer'"
    await bench.bus.dead_letters.replay(bench.job, letter.id)
    (again,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    assert (again.group.prompt, again.num_deliveries) == (1, 1)
    assert await bench.bus.dead_letters.list(bench.job) == []
    assert await bench.bus.samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == {1}
    with pytest.raises(UnknownDeadLetter, match=f"no dead letter {letter.id}"):
        await bench.bus.dead_letters.replay(bench.job, letter.id)


async def test_a_dropped_dead_letter_is_gone_and_the_others_stay(bench: Bench) -> None:
    await publish_groups(bench, 1, 2)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    for delivery in await consumer.fetch(2, timeout_s=PATIENT_S):
        await delivery.dead_letter("unwanted")
    first, second = await bench.bus.dead_letters.list(bench.job)
    await bench.bus.dead_letters.drop(bench.job, first.id)
    assert await bench.bus.dead_letters.list(bench.job) == [second]
    with pytest.raises(UnknownDeadLetter):
        await bench.bus.dead_letters.drop(bench.job, first.id)


async def test_a_purge_removes_what_a_checkpoint_covers_and_nothing_later(bench: Bench) -> None:
    samples = bench.bus.samples
    places = list(itertools.product(Stage, (1, 2), (0, 1, 2)))
    for stage, incarnation, iteration in places:
        await samples.publish(stage, a_group(bench.job, 1, incarnation=incarnation, iteration=iteration))
    await samples.purge(bench.job, incarnation=2, iteration=1)
    left = [
        (stage, incarnation, iteration)
        for stage, incarnation, iteration in places
        if await samples.published(bench.job, stage, incarnation=incarnation, iteration=iteration)
    ]
    assert left == [(stage, 2, iteration) for stage in Stage for iteration in (1, 2)]
    consumer = await samples.consumer(bench.job, Stage.SCORED, "actor", on_dead_letter=bench.on_dead_letter)
    assert [delivery.group.iteration for delivery in await consumer.fetch(9, timeout_s=PATIENT_S)] == [1, 2]


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


async def test_opening_a_job_again_keeps_what_it_holds(bench: Bench) -> None:
    await publish_groups(bench, 1)
    await bench.bus.streams.open_job(bench.job)
    assert await bench.bus.samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == {1}


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "x" * 65])
async def test_a_consumer_name_that_could_reach_past_its_place_is_refused(bench: Bench, name: str) -> None:
    with pytest.raises(ValueError, match="consumer name"):
        await bench.bus.events.consumer(bench.job, name, on_dead_letter=bench.on_dead_letter)


async def test_the_term_grows_by_compare_and_set_only(bench: Bench) -> None:
    register = bench.bus.term
    term, revision = await register.read()
    after = await register.advance(expected_revision=revision, term=term + 3)
    assert await register.read() == (term + 3, after)
    with pytest.raises(StaleTerm, match=f"since revision {revision} was read"):
        await register.advance(expected_revision=revision, term=term + 9)
    with pytest.raises(ValueError, match="only grows"):
        await register.advance(expected_revision=after, term=term + 3)
    assert await register.read() == (term + 3, after)


async def test_of_writers_that_race_for_the_next_term_one_wins(bench: Bench) -> None:
    register = bench.bus.term
    term, revision = await register.read()
    outcomes = await asyncio.gather(
        *(register.advance(expected_revision=revision, term=term + 1 + by) for by in range(5)), return_exceptions=True
    )
    assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, StaleTerm) for outcome in outcomes) == 4


async def test_consumers_and_publishers_go_on_after_the_server_was_killed_and_restarted(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=replace(LIMITS, deadline_s=30.0))
        job = JobId("restarted")
        bench = Bench(bus, job, no_raw_messages, [])
        await bus.streams.open_job(job)
        await publish_groups(bench, 1, 2)
        consumer = await bus.samples.consumer(job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter)
        first, second = await consumer.fetch(2, timeout_s=PATIENT_S)
        await first.ack()
        os.kill(servers.nats.pid, signal.SIGKILL)
        await servers.nats.exited()
        fetching = asyncio.create_task(consumer.fetch(1, timeout_s=60.0))
        publishing = asyncio.create_task(publish_groups(bench, 3))
        await servers.start()
        await publishing
        prompts: list[int] = []
        deliveries = await fetching
        while deliveries or await consumer.num_waiting():
            for delivery in deliveries:
                prompts.append(delivery.group.prompt)
                await delivery.ack()
            deliveries = await consumer.fetch(2, timeout_s=SOON_S)
        # 1 may come again: its acknowledgement was in the killed process's memory.
        assert {2, 3} <= set(prompts) <= {1, 2, 3}
        await second.ack()
        assert await bus.samples.published(job, Stage.GENERATED, incarnation=1, iteration=0) == {1, 2, 3}
        await bus.close()


async def test_streams_that_the_servers_disk_cannot_hold_are_refused_when_the_job_is_opened(nats_url: str) -> None:
    bus = await NatsBus.connect(nats_url, name="test", limits=replace(LIMITS, samples_max_bytes=2**60))
    with pytest.raises(StreamFull, match=rf"does not keep {2**60} bytes for stream TG_SAMPLES_VAST: .*free disk space"):
        await bus.streams.open_job(JobId("vast"))
    await bus.close()


async def test_a_publish_gives_up_at_its_deadline(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=replace(LIMITS, deadline_s=0.5))
        job = JobId("given-up")
        await bus.streams.open_job(job)
        await servers.nats.stop()
        with pytest.raises(BusUnavailable, match=rf"did not answer tg\.events\.{job} within 0\.5 s"):
            await bus.events.publish(numbered(source(), job, 1))
        await bus.close()


async def test_to_tell_a_response_waits_for_no_server(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=LIMITS)
        job = JobId("untold")
        await servers.nats.stop()
        async with asyncio.timeout(SOON_S):
            for prompt in range(100):
                await bus.samples.tell_response(a_response(job, prompt, num_tokens=2**16))
        await bus.close()


async def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with socket.socket() as nobody:  # bound and not listening: nobody else gets the port, and it refuses
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        limits = BusLimits(deadline_s=0.5)
        with pytest.raises(BusUnavailable, match=rf"nats://127.0.0.1:{port} did not answer within 0.5 s") as refused:
            await NatsBus.connect(f"nats://me:hidden@127.0.0.1:{port}", name="test", limits=limits)
    assert "hidden" not in str(refused.value)
