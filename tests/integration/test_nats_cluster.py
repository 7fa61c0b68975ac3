"""A bus on three NATS servers: each stream has three copies, and the death of its leader loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from tests import effort
from tests.contract.bus_bench import a_group
from tests.replicated import NUM_SERVERS, Replicated, until
from tidegate.adapters import nats_bus, nats_link, subjects
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.nats_link import WRONG_LAST_SEQUENCE, NatsLink, NatsRefused, stored_sequence
from tidegate.events import EventSource
from tidegate.ports.bus import BusLimits, DeadLetter, Stage
from tidegate.types import JobId
from tidegate.v1 import events_pb2

JOB = JobId("job")
READS = 20
MOVES = 40
"""One in ten leaves messages out where nobody looks for lost ones. test_nats_link has the sure case."""


def all_but(server: str) -> list[str]:
    return [name for name in (f"nats{number}" for number in range(NUM_SERVERS)) if name != server]


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Replicated]:
    async with Replicated(tmp_path / "servers", has_redis=False) as started:
        yield started


@pytest.mark.parametrize(("asked", "want"), effort.cases([(None, 3), (1, 1)], always=[(None, 3)]))
async def test_streams_have_as_many_copies_as_are_asked_for(servers: Replicated, asked: int | None, want: int) -> None:
    bus = await NatsBus.connect(servers.nats_url, name="test", limits=BusLimits(num_replicas=asked))
    await bus.streams.open_job(JOB)
    await bus.term.read()
    client = await nats.connect(servers.nats_url.split(","))
    for stream in (subjects.events_stream(JOB), subjects.samples_stream(JOB), subjects.TERM_STREAM):
        info = await client.jetstream().stream_info(stream)
        assert info.config.num_replicas == want, stream
    await client.close()
    await bus.close()


async def test_the_death_of_a_leader_loses_no_event_and_no_term(servers: Replicated) -> None:
    bus = await NatsBus.connect(servers.nats_url, name="test")
    await bus.streams.open_job(JOB)
    _, revision = await bus.term.read()
    await bus.term.advance(expected_revision=revision, term=7)
    source = EventSource("actor@n0", role=None, boot=1, now_ns=lambda: 1)
    bodies = [events_pb2.Failed(what=events_pb2.Failed.WHAT_SAMPLE, message=f"{number}") for number in range(40)]
    for body in bodies[:20]:
        await bus.events.publish(source.event(body, job=JOB, incarnation=1))
    servers.kill(await servers.leader_of(subjects.events_stream(JOB)))
    for body in bodies[20:]:
        await bus.events.publish(source.event(body, job=JOB, incarnation=1))
    found = [each.failed.message async for _, each in bus.events.read(JOB)]
    assert found == [body.message for body in bodies]
    assert (await bus.term.read())[0] == 7
    await bus.close()


async def test_a_read_while_the_connection_moves_leaves_nothing_out(servers: Replicated) -> None:
    """What is under way to the server that is left never arrives. What comes after it does."""
    link = await NatsLink.connect(servers.nats_url, name="test", deadline_s=30.0)
    await link.ensure_stream({"name": "LINK", "subjects": ["link"], "num_replicas": 3, "allow_direct": True})
    # Large enough that an answer takes as long as a move.
    sequences = [(await link.publish("link", bytes(20_000), stream="LINK"))["seq"] for _ in range(200)]
    num_cut_short = 0
    for number in range(1, 1 + effort.examples(MOVES)):
        moves_at = link._connection.stats["in_msgs"] + number
        reading = asyncio.create_task(link.read("LINK", from_sequence=1))
        while link._connection.stats["in_msgs"] < moves_at and not reading.done():  # noqa: ASYNC110 - a count only
            await asyncio.sleep(0)
        await link._connection.force_reconnect()
        found = [stored_sequence(message) for message in await reading]
        assert found, "an empty answer would be the end of the stream"
        assert found == sequences[: len(found)]
        num_cut_short += len(found) < len(sequences)
    assert num_cut_short, "no move met an answer on its way"
    await link.close()


@pytest.mark.parametrize("once", [{"message_id": "one"}, {"last_on_subject": 0}], ids=["by its id", "by its subject"])
async def test_a_message_that_its_server_still_works_on_is_waited_for(
    servers: Replicated, once: dict[str, Any]
) -> None:
    """The leader refuses a second attempt as long as it waits for the copies of the first one."""
    any_link = await NatsLink.connect(servers.nats_url, name="test", deadline_s=30.0)
    await any_link.ensure_stream({"name": "LINK", "subjects": ["link"], "num_replicas": 3})
    await any_link.close()
    leader = await servers.leader_of("LINK")
    link = await NatsLink.connect(servers.url_of_nats(int(leader[-1])), name="test", deadline_s=30.0)
    followers = all_but(leader)
    for name in followers:
        servers.freeze(name)
    answers = link._connection.stats["in_msgs"]
    publishing = asyncio.create_task(link.publish("link", b"stored", stream="LINK", **once))

    async def is_answered() -> bool:
        return publishing.done() or link._connection.stats["in_msgs"] > answers

    await until(is_answered)
    assert not publishing.done()
    for name in followers:
        servers.thaw(name)
    outcome = (await asyncio.gather(publishing, return_exceptions=True))[0]
    if isinstance(outcome, NatsRefused):
        assert "last_on_subject" in once
        assert outcome.err_code == WRONG_LAST_SEQUENCE, "the first attempt was stored"
    else:
        assert isinstance(outcome, dict)
        assert outcome["seq"] == 1
    assert await link.next_on("LINK", "link", from_sequence=1) == (1, b"stored")
    assert await link.next_on("LINK", "link", from_sequence=2) is None
    await link.close()


@pytest.mark.long
async def test_a_read_that_was_given_to_a_server_that_is_gone_is_asked_for_again_soon(
    servers: Replicated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the reads, as long as the others do not know."""
    link = await NatsLink.connect(servers.nats_url, name="test", deadline_s=600.0)
    await link.ensure_stream({"name": "LINK", "subjects": ["link"], "num_replicas": 3, "allow_direct": True})
    await link.publish("link", b"stored", stream="LINK")
    await link.close()
    gone = await servers.leader_of("LINK")
    others = all_but(gone)
    servers.freeze(gone)

    async def is_led_anew() -> bool:
        with suppress(nats.errors.Error):
            return (await servers.cluster_of("LINK", asked=others[0])).leader in others
        return False

    await until(is_led_anew)
    urls = ",".join(servers.url_of_nats(int(name[-1])) for name in others)
    link = await NatsLink.connect(urls, name="test", deadline_s=600.0)
    monkeypatch.setattr(nats_link, "_ATTEMPT_S", 600.0)
    async with asyncio.timeout(60):
        for _ in range(READS):
            assert [message.data for message in await link.read("LINK", from_sequence=1)] == [b"stored"]
    await link.close()


async def test_a_follower_sees_an_event_that_its_hint_came_before(
    servers: Replicated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is a hint as soon as it is sent. It can be read once its copies are there."""
    monkeypatch.setattr(nats_bus, "_FOLLOW_S", 600.0)
    any_bus = await NatsBus.connect(servers.nats_url, name="test")
    await any_bus.streams.open_job(JOB)
    await any_bus.close()
    leader = await servers.leader_of(subjects.events_stream(JOB))
    bus = await NatsBus.connect(servers.url_of_nats(int(leader[-1])), name="test")
    source = EventSource("actor@n0", role=None, boot=1, now_ns=lambda: 1)
    first, second = (source.event(events_pb2.Failed(message=each), job=JOB, incarnation=1) for each in "ab")
    await bus.events.publish(first)
    following = bus.events.read(JOB, follow=True)
    assert (await anext(following))[1] == first
    followers = all_but(leader)
    for name in followers:
        servers.freeze(name)
    hinted, saw_nothing = asyncio.Event(), asyncio.Event()

    async def on_hint(_: object) -> None:
        hinted.set()

    async def on_leader_asked(_: object) -> None:
        saw_nothing.set()

    await bus._link.subscribe(subjects.event_subject(JOB), on_hint)
    await bus._link.subscribe(f"$JS.API.STREAM.MSG.GET.{subjects.events_stream(JOB)}", on_leader_asked)
    publishing = asyncio.create_task(bus.events.publish(second))
    await hinted.wait()
    seeing = asyncio.ensure_future(anext(following))
    asked = asyncio.create_task(saw_nothing.wait())
    await asyncio.wait((asked, seeing), return_when=asyncio.FIRST_COMPLETED)
    assert asked.done(), await seeing
    for name in followers:
        servers.thaw(name)
    assert (await asyncio.wait_for(seeing, 30))[1] == second
    await publishing
    await following.aclose()
    await bus.close()


async def test_all_that_a_consumer_with_copies_sends_for_a_request_is_taken(servers: Replicated) -> None:
    """It closes the request before it sends: what were left behind would come again after `sample_ack_wait_s` alone."""
    limits = BusLimits(sample_ack_wait_s=60.0)
    bus = await NatsBus.connect(servers.nats_url, name="test", limits=limits)
    await bus.streams.open_job(JOB)

    async def nothing(letter: DeadLetter) -> None:
        raise AssertionError(letter)

    consumer = await bus.samples.consumer(JOB, Stage.GENERATED, "inference", on_dead_letter=nothing)
    for prompts in (range(8), range(8, 16), range(16, 24)):
        for prompt in prompts:
            await bus.samples.publish(Stage.GENERATED, a_group(job=JOB, prompt=prompt))
        found: set[int] = set()
        while len(found) < len(prompts):
            deliveries = await consumer.fetch(8, timeout_s=30.0)
            assert deliveries, f"{len(found)} of {len(prompts)} groups came"
            assert {each.num_deliveries for each in deliveries} == {1}
            found |= {each.group.prompt for each in deliveries}
            for each in deliveries:
                await each.ack()
    await bus.close()
