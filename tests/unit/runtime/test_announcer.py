"""A full stream of events: figures are left out, and any other event fails with a remedy."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.adapters.memory_bus import MemoryBus
from tidegate.events import EventSource
from tidegate.ports.bus import BusLimits, StreamFull, StreamStuck
from tidegate.runtime.announcer import Announcer
from tidegate.types import JobId, Role
from tidegate.v1 import events_pb2

JOB = JobId("full")


async def test_a_full_stream_leaves_out_figures_and_fails_other_events_with_the_key_to_raise() -> None:
    bus = MemoryBus(BusLimits(events_max_bytes=200))
    await bus.streams.open_job(JOB)
    source = EventSource("actor@n0", role=Role.ACTOR, boot=1, now_ns=lambda: 1)
    announcer = Announcer(bus.events, source, JOB)

    await announcer.publish(events_pb2.Failed(message="x" * 130), incarnation=1)
    for figure in (events_pb2.Progress(num_done=1), events_pb2.Backlog(num_messages=1), events_pb2.Generation()):
        assert await announcer.publish(figure, incarnation=1) is None
    assert [event.WhichOneof("body") async for _, event in bus.events.read(JOB)] == ["failed"]
    with pytest.raises(StreamFull, match=r"raise runtime.events_max_bytes and resume"):
        await announcer.publish(events_pb2.Failed(message="lost"), incarnation=1)
    with pytest.raises(StreamFull, match=r"raise runtime.events_max_bytes and resume"):
        await announcer.until_unusable()


async def test_a_stream_that_takes_nothing_more_is_unusable_though_only_a_figure_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(event: events_pb2.Event) -> int:
        raise StreamStuck("make room, restart it and resume")

    bus = MemoryBus()
    monkeypatch.setattr(bus.events, "publish", refuse)
    source = EventSource("actor@n0", role=Role.ACTOR, boot=1, now_ns=lambda: 1)
    announcer = Announcer(bus.events, source, JOB)
    assert await announcer.publish(events_pb2.Progress(num_done=1), incarnation=1) is None
    with pytest.raises(StreamStuck, match="make room"):
        await asyncio.wait_for(announcer.until_unusable(), 1.0)
