"""Every bus stores a group of samples once, and delivers it until somebody settles it or a purge removes it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.contract.bus_bench import (
    COMES_AGAIN,
    LIMITS,
    PATIENT_S,
    SOON_S,
    Bench,
    Open,
    a_group,
    bench,
    nats_url,
    open_bench,
    publish_groups,
)
from tidegate.adapters import subjects
from tidegate.codec import WireError
from tidegate.ports.bus import JobNotOpen, Stage
from tidegate.types import JobId

__all__ = ["bench", "nats_url", "open_bench"]


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


async def test_an_unsettled_group_is_delivered_again_and_counts_its_deliveries(open_bench: Open) -> None:
    bench = await open_bench(COMES_AGAIN)
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (first,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    (second,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    assert [first.num_deliveries, second.num_deliveries] == [1, 2]
    await first.ack()  # late, by whoever had it first: it counts
    assert await consumer.num_waiting() == 0


async def test_a_group_in_progress_does_not_come_again(open_bench: Open) -> None:
    bench = await open_bench(replace(LIMITS, sample_ack_wait_s=5.0))
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (held,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    for _ in range(3):
        await held.in_progress()
        assert await consumer.fetch(1, timeout_s=1.8) == []
    (again,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    assert again.num_deliveries == 2


async def test_a_group_handed_back_with_a_delay_comes_after_it_and_others_before(bench: Bench) -> None:
    await publish_groups(bench, 1)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (first,) = await consumer.fetch(1, timeout_s=PATIENT_S)
    await first.nak(delay_s=3.0)
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


async def test_messages_of_strangers_among_the_samples_hinder_nobody(bench: Bench) -> None:
    await publish_groups(bench, 1)
    one = subjects.group_subject(bench.job, Stage.GENERATED, incarnation=1, iteration=0, prompt=1)
    for stranger in (one.replace("generated", "foreign"), f"{one}.more", one.replace(".1.0.1", ".1.0.one")):
        await bench.publish_raw(stranger, b"\xff")
    assert await bench.bus.samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == {1}
    await bench.bus.samples.purge(bench.job, incarnation=2, iteration=0)
    assert await bench.bus.samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == set()


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
