"""The bus on a real nats-server outlives the server's death, and gives up on one that does not answer."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.bus_bench import (
    COMES_AGAIN,
    LIMITS,
    PATIENT_S,
    SOON_S,
    Bench,
    a_group,
    numbered,
    publish_groups,
    source,
)
from tests.stopping import stop
from tidegate.adapters import subjects
from tidegate.adapters.nats_bus import NatsBus
from tidegate.ports.bus import BusLimits, BusUnavailable, Stage, StreamStuck
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import JobId


def remove_message_files(folder: Path, stream: str) -> None:
    """The server goes on with the file that it has open, and cannot make the next one."""
    (messages,) = folder.glob(f"nats/**/{stream}/msgs")
    shutil.rmtree(messages)


async def no_raw_messages(subject: str, payload: bytes) -> None:
    raise AssertionError(f"{subject}: this bench publishes groups only")


async def test_consumers_and_publishers_go_on_after_the_server_was_killed_and_restarted(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=COMES_AGAIN)
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


async def test_a_publish_gives_up_at_its_deadline(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as servers:
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=LIMITS)
        job = JobId("given-up")
        await bus.streams.open_job(job)
        await servers.nats.stop()
        bus._link._deadline_s = 0.5
        with pytest.raises(BusUnavailable, match=rf"did not answer tg\.events\.{job} within 0\.5 s"):
            await bus.events.publish(numbered(source(), job, 1))
        await bus.close()


async def test_a_server_that_cannot_write_is_told_from_one_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.adapters.nats_link._LAST_ATTEMPT_S", 1.0)
    async with EmbeddedServers(tmp_path) as servers:
        limits = replace(LIMITS, deadline_s=1.0, samples_max_bytes=2**30)
        bus = await NatsBus.connect(servers.nats.url, name="test", limits=limits)
        job = JobId("unwritten")
        await bus.streams.open_job(job)
        groups = (a_group(job, prompt, num_tokens=100_000) for prompt in itertools.count())
        await bus.samples.publish(Stage.GENERATED, next(groups))
        remove_message_files(tmp_path, subjects.samples_stream(job))

        async def fill() -> None:
            for group in groups:
                await bus.samples.publish(Stage.GENERATED, group)

        with pytest.raises(
            StreamStuck, match=r"takes no message for stream TG_SAMPLES_UNWRITTEN.*restart it and resume"
        ):
            await fill()
        stop(servers.nats.pid)
        with pytest.raises(BusUnavailable):
            await bus.samples.publish(Stage.GENERATED, next(groups))
        os.kill(servers.nats.pid, signal.SIGCONT)
        await bus.close()


async def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with socket.socket() as nobody:  # bound and not listening: nobody else gets the port, and it refuses
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        limits = BusLimits(deadline_s=0.5)
        with pytest.raises(BusUnavailable, match=rf"nats://127.0.0.1:{port} did not answer within 0.5 s") as refused:
            await NatsBus.connect(f"nats://me:hidden@127.0.0.1:{port}", name="test", limits=limits)
    assert "hidden" not in str(refused.value)
