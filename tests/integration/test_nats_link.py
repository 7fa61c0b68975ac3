"""Calls to a real nats-server that does not answer yet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from tidegate.adapters import subjects
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.nats_link import NatsLink, stored_sequence
from tidegate.events import EventSource
from tidegate.ports.bus import JobNotOpen
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import JobId
from tidegate.v1 import events_pb2

JOB = JobId("job")
STREAM = {"name": "LINK", "subjects": ["link.>"], "storage": "memory"}


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[NatsLink]:
    async with EmbeddedServers(tmp_path) as servers:
        opened = await NatsLink.connect(servers.nats.url, name="test", deadline_s=10.0)
        yield opened
        await opened.close()


async def test_a_read_waits_for_a_stream_that_does_not_respond_yet(link: NatsLink) -> None:
    """A server that restarts has its streams before it answers reads from them."""
    await link.ensure_stream({**STREAM, "allow_direct": False})
    await link.publish("link.one", b"stored", stream="LINK", message_id="one")
    refused = asyncio.Event()

    async def on_lookup(_: object) -> None:
        refused.set()

    end = await link.subscribe("$JS.API.STREAM.INFO.LINK", on_lookup)
    reading = asyncio.create_task(link.read("LINK", from_sequence=1))
    await asyncio.wait_for(refused.wait(), 60)
    await end()
    await link.ensure_stream({**STREAM, "allow_direct": True})
    assert [message.data for message in await reading] == [b"stored"]


Answer = Sequence[tuple[int, int]] | None
"""The messages' sequences, each with that of the message sent before it (0: none). None: no answer at all."""


class Answers:
    """Answers direct reads of a stream as the server does."""

    def __init__(self, answers: Mapping[int, Sequence[Answer]]) -> None:
        """`answers`: by the first sequence that is asked for, in order. The last one is repeated."""
        self._answers = {sequence: list(some) for sequence, some in answers.items()}

    async def begin(self, link: NatsLink, stream: str, data: Mapping[int, bytes] = MappingProxyType({})) -> None:
        async def on_read(message: Msg) -> None:
            some = self._answers[json.loads(message.data)["seq"]]
            answer = some.pop(0) if len(some) > 1 else some[0]
            if answer is None:
                return
            for sequence, before in answer:
                headers = {"Nats-Sequence": str(sequence), "Nats-Last-Sequence": str(before)}
                await link._connection.publish(message.reply, data.get(sequence, b"stored"), headers=headers)
            status = "204" if answer else "404"
            await link._connection.publish(message.reply, headers={"Status": status})

        await link.subscribe(f"$JS.API.DIRECT.GET.{stream}", on_read)


async def test_a_read_ends_where_a_message_was_lost_on_its_way(link: NatsLink) -> None:
    await link.ensure_stream({**STREAM, "allow_direct": False})
    answers: dict[int, list[Answer]] = {
        1: [[(1, 0), (2, 1), (5, 4), (6, 5)]],
        3: [None, [(5, 4), (6, 5)], [(4, 0)]],
        5: [[]],
    }
    await Answers(answers).begin(link, "LINK")
    assert [stored_sequence(message) for message in await link.read("LINK", from_sequence=1)] == [1, 2]
    assert [stored_sequence(message) for message in await link.read("LINK", from_sequence=3)] == [4]
    assert await link.read("LINK", from_sequence=5) == []


async def test_a_page_that_has_only_a_copy_of_the_state_is_no_end(tmp_path: Path) -> None:
    """The copy is no event. Here the events after it are lost on their way."""
    event = EventSource("actor@n0", role=None, boot=1, now_ns=lambda: 1).event(
        events_pb2.Failed(message="stored"), job=JOB, incarnation=1
    )
    async with EmbeddedServers(tmp_path) as servers:
        bus = await NatsBus.connect(servers.nats.url, name="test")
        stream = subjects.events_stream(JOB)
        names = [subjects.event_subject(JOB), subjects.copy_subject(JOB)]
        await bus._link.ensure_stream({"name": stream, "subjects": names, "storage": "memory", "allow_direct": False})
        answers = {1: [[(1, 0), (3, 2)]], 2: [[(2, 0)]]}
        await Answers(answers).begin(bus._link, stream, {1: b"no event", 2: event.SerializeToString()})
        assert await bus.events.page(JOB, after_sequence=0) == [(2, event)]
        await bus.close()


async def test_a_read_from_no_stream_says_that_there_is_none(link: NatsLink) -> None:
    with pytest.raises(JobNotOpen, match="no stream ABSENT"):
        await link.read("ABSENT", from_sequence=1)


async def test_only_a_lost_connection_is_in_the_log(tmp_path: Path) -> None:
    with capture_logs() as lines:
        async with EmbeddedServers(tmp_path) as servers:
            closed = await NatsLink.connect(servers.nats.url, name="test", deadline_s=10.0)
            await closed.close()
            assert lines == []
            lost = await NatsLink.connect(servers.nats.url, name="test", deadline_s=10.0)
            os.kill(servers.nats.pid, signal.SIGKILL)
            await servers.nats.exited()
            async with asyncio.timeout(60):
                while "nats_disconnected" not in [line["event"] for line in lines]:  # noqa: ASYNC110 - a log only
                    await asyncio.sleep(0.01)
            await lost.close()
    assert [line["event"] for line in lines].count("nats_disconnected") == 1


async def test_a_pull_without_a_time_to_wait_is_answered_at_once(link: NatsLink) -> None:
    """A scheduler that has just moved a GPU asks so before each of its next steps."""
    await link.ensure_stream(STREAM)
    config = {"durable_name": "one", "ack_policy": "explicit"}
    await link.api("CONSUMER.DURABLE.CREATE.LINK.one", {"stream_name": "LINK", "config": config})
    asked: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def on_ask(message: Msg) -> None:
        asked.put_nowait(json.loads(message.data))

    end = await link.subscribe("$JS.API.CONSUMER.MSG.NEXT.LINK.one", on_ask)
    assert await link.pull("LINK", "one", num=1, timeout_s=0.0) == []
    await link.publish("link.one", b"stored", stream="LINK", message_id="one")
    assert [message.data for message in await link.pull("LINK", "one", num=1, timeout_s=0.0)] == [b"stored"]
    for _ in range(2):
        request = await asyncio.wait_for(asked.get(), 60)
        assert (request.get("no_wait"), request.get("expires")) == (True, None)
    await end()
    assert asked.empty()
