"""Every bus puts aside what cannot be decoded or delivered, and a person replays or drops it."""

from __future__ import annotations

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
    number_of,
    numbered,
    open_bench,
    publish_groups,
    source,
)
from tidegate.ports.bus import DeadLetter, Stage, UnknownDeadLetter
from tidegate.v1 import samples_pb2

__all__ = ["bench", "nats_url", "open_bench"]


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


@pytest.mark.parametrize("is_seen", [False, True], ids=["before the consumer saw it", "after the consumer saw it"])
async def test_something_else_on_the_subject_of_a_group_to_come_keeps_no_group_out(bench: Bench, is_seen: bool) -> None:
    samples, group = bench.bus.samples, a_group(bench.job, 8)
    consumer = await samples.consumer(bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter)
    await bench.publish_raw(f"tg.samples.{bench.job}.generated.1.0.8", b"\xff\xff")
    if is_seen:
        assert await consumer.fetch(1, timeout_s=SOON_S) == []
    assert await samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == set()

    assert await samples.publish(Stage.GENERATED, group) is True
    await bench.publish_raw(f"tg.samples.{bench.job}.generated.1.0.8", b"\xfe")
    assert await samples.publish(Stage.GENERATED, group) is False

    assert [delivery.group for delivery in await consumer.fetch(3, timeout_s=PATIENT_S)] == [group]
    stored = await samples.stored_group(bench.job, Stage.GENERATED, incarnation=1, iteration=0, prompt=8)
    assert stored == group
    assert await samples.published(bench.job, Stage.GENERATED, incarnation=1, iteration=0) == {8}
    assert len(bench.dead_letters) == 2


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


async def test_a_message_that_comes_again_after_its_dead_letter_was_dropped_is_settled_unreported(
    open_bench: Open,
) -> None:
    bench = await open_bench(COMES_AGAIN)

    async def dies(letter: DeadLetter) -> None:
        raise RuntimeError(f"the consumer died with {letter.id}")

    await bench.publish_raw(f"tg.samples.{bench.job}.generated.1.0.8", b"\xff\xff")
    await publish_groups(bench, 2)
    dying = await bench.bus.samples.consumer(bench.job, Stage.GENERATED, "inference", on_dead_letter=dies)
    with pytest.raises(RuntimeError, match="the consumer died"):
        await dying.fetch(10, timeout_s=PATIENT_S)
    (letter,) = await bench.bus.dead_letters.list(bench.job)
    await bench.bus.dead_letters.drop(bench.job, letter.id)
    consumer = await bench.bus.samples.consumer(
        bench.job, Stage.GENERATED, "inference", on_dead_letter=bench.on_dead_letter
    )
    (delivery,) = await consumer.fetch(10, timeout_s=PATIENT_S)
    assert delivery.group.prompt == 2
    await delivery.ack()
    assert await consumer.num_waiting() == 0
    assert (bench.dead_letters, await bench.bus.dead_letters.list(bench.job)) == ([], [])
