"""Calls to a real nats-server that does not answer yet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from tidegate.adapters.nats_link import NatsLink, stored_sequence
from tidegate.ports.bus import JobNotOpen
from tidegate.runtime.embedded import EmbeddedServers

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
    await asyncio.wait_for(refused.wait(), 10)
    await end()
    await link.ensure_stream({**STREAM, "allow_direct": True})
    assert [message.data for message in await reading] == [b"stored"]


async def test_a_read_ends_where_a_message_was_lost_on_its_way(link: NatsLink) -> None:
    """Each message names the one that was sent before it. The test answers as the server does."""
    await link.ensure_stream({**STREAM, "allow_direct": False})
    answers = [
        [(1, 0), (2, 1), (5, 4), (6, 5)],
        [(5, 4), (6, 5)],
        [],
        [(4, 0)],
    ]

    async def on_read(message: Msg) -> None:
        answer = answers.pop(0)
        for sequence, before in answer:
            headers = {"Nats-Sequence": str(sequence), "Nats-Last-Sequence": str(before)}
            await link._connection.publish(message.reply, b"stored", headers=headers)
        await link._connection.publish(message.reply, headers={"Status": "204", "Nats-Num-Pending": "0"})

    await link.subscribe("$JS.API.DIRECT.GET.LINK", on_read)
    assert [stored_sequence(message) for message in await link.read("LINK", from_sequence=1)] == [1, 2]
    assert len(answers) == 3
    assert [stored_sequence(message) for message in await link.read("LINK", from_sequence=3)] == [4]
    assert not answers


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
            async with asyncio.timeout(10):
                while "nats_disconnected" not in [line["event"] for line in lines]:  # noqa: ASYNC110 - a log only
                    await asyncio.sleep(0.01)
            await lost.close()
    assert [line["event"] for line in lines].count("nats_disconnected") == 1


async def test_a_pull_without_a_time_to_wait_is_answered_at_once(link: NatsLink) -> None:
    """A scheduler that has just moved a GPU asks so before each of its next steps."""
    await link.ensure_stream(STREAM)
    config = {"durable_name": "one", "ack_policy": "explicit"}
    await link.api("CONSUMER.DURABLE.CREATE.LINK.one", {"stream_name": "LINK", "config": config})
    asked: list[dict[str, object]] = []

    async def on_ask(message: Msg) -> None:
        asked.append(json.loads(message.data))

    end = await link.subscribe("$JS.API.CONSUMER.MSG.NEXT.LINK.one", on_ask)
    assert await link.pull("LINK", "one", num=1, timeout_s=0.0) == []
    await link.publish("link.one", b"stored", stream="LINK", message_id="one")
    assert [message.data for message in await link.pull("LINK", "one", num=1, timeout_s=0.0)] == [b"stored"]
    await end()
    assert [(each.get("no_wait"), each.get("expires")) for each in asked] == [(True, None)] * 2
