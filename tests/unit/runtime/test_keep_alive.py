"""A lead keeps the messages that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.component_bench import ACK_WAIT_S, JOB, Changes, ManualClock
from tests.watched_samples import WatchedSamples, generated_group
from tidegate.adapters.memory_bus import MemoryBus
from tidegate.ports.bus import BusLimits, SampleDelivery, Stage
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.keep_alive import PER_ACK_WAIT, keep_alive


async def never(letter: object) -> None:
    raise AssertionError(f"dead letter {letter}")


async def test_a_held_message_is_delivered_once_however_long_it_is_held() -> None:
    clock, changes = ManualClock(), Changes()
    bus = MemoryBus(BusLimits(sample_ack_wait_s=ACK_WAIT_S), now=clock.now, sleep=clock.sleep)
    await bus.streams.open_job(JOB)
    watch = WatchedSamples(bus.samples, changes)
    await watch.publish(Stage.GENERATED, generated_group(0))
    consumer = await watch.consumer(JOB, Stage.GENERATED, "reader", on_dead_letter=never)
    held: Sequence[SampleDelivery] = await consumer.fetch(1, timeout_s=0)
    keeping = asyncio.create_task(keep_alive(lambda: held, ack_wait_s=ACK_WAIT_S, sleep=clock.sleep))
    num_acks = 3 * PER_ACK_WAIT
    for number in range(1, num_acks + 1):
        await clock.advance(ACK_WAIT_S / PER_ACK_WAIT)
        await changes.until(lambda number=number: len(watch.prompts("in progress")) == number)  # type: ignore[misc]
        assert await consumer.fetch(1, timeout_s=0) == []
    await end_task(keeping)
    clock.now_s += ACK_WAIT_S
    assert [each.group.prompt for each in await consumer.fetch(1, timeout_s=0)] == [0], "nobody keeps it any more"
