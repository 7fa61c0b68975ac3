"""Groups of samples as tests make them, and their stream with a log of its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.component_bench import JOB, Changes
from tidegate.ports.bus import OnDeadLetter, SampleConsumer, SampleDelivery, SampleStream, Stage
from tidegate.types import JobId
from tidegate.v1 import samples_pb2, types_pb2


class WatchedSamples:
    """The sample stream, which notes its calls in `acts`, as (act, prompt), and wakes `changes`.

    `told` has the responses that were told, and `num_listeners` counts those who have listened to them.
    `before_ack` sees a group before its acknowledgement counts. Acknowledgements of `lost_acks` get lost, once.
    """

    def __init__(self, samples: SampleStream, changes: Changes) -> None:
        self.acts: list[tuple[str, int]] = []
        self.lost_acks: set[int] = set()
        self.before_ack: Callable[[samples_pb2.SampleGroup], None] = lambda _: None
        self.told: list[samples_pb2.SampleGroup] = []
        self.num_listeners = 0
        self._samples = samples
        self._changes = changes

    def note(self, act: str, group: samples_pb2.SampleGroup) -> None:
        self.acts.append((act, group.prompt))
        self._changes.notify()

    def prompts(self, act: str) -> list[int]:
        return [prompt for done, prompt in self.acts if done == act]

    async def publish(self, stage: Stage, group: samples_pb2.SampleGroup) -> bool:
        stored = await self._samples.publish(stage, group)
        self.note(f"publish {stage}", group)
        return stored

    async def consumer(self, job: JobId, stage: Stage, name: str, *, on_dead_letter: OnDeadLetter) -> _WatchedConsumer:
        consumer = await self._samples.consumer(job, stage, name, on_dead_letter=on_dead_letter)
        return _WatchedConsumer(consumer, self)

    async def published(self, job: JobId, stage: Stage, *, incarnation: int, iteration: int) -> frozenset[int]:
        return await self._samples.published(job, stage, incarnation=incarnation, iteration=iteration)

    async def stored_group(self, job: JobId, stage: Stage, **place: int) -> samples_pb2.SampleGroup | None:
        return await self._samples.stored_group(job, stage, **place)

    async def tell_response(self, response: samples_pb2.SampleGroup) -> None:
        self.told.append(response)
        await self._samples.tell_response(response)
        self.note("tell", response)

    @asynccontextmanager
    async def responses(self, job: JobId) -> AsyncIterator[AsyncIterator[samples_pb2.SampleGroup]]:
        async with self._samples.responses(job) as responses:
            self.num_listeners += 1
            self._changes.notify()
            yield responses

    async def purge(self, job: JobId, *, incarnation: int, iteration: int) -> None:
        await self._samples.purge(job, incarnation=incarnation, iteration=iteration)


class _WatchedConsumer:
    def __init__(self, consumer: SampleConsumer, watch: WatchedSamples) -> None:
        self._consumer = consumer
        self._watch = watch

    async def fetch(self, max_groups: int, *, timeout_s: float) -> list[_WatchedDelivery]:
        deliveries = await self._consumer.fetch(max_groups, timeout_s=timeout_s)
        for delivery in deliveries:
            self._watch.note("fetch", delivery.group)
        return [_WatchedDelivery(delivery, self._watch) for delivery in deliveries]

    async def num_waiting(self) -> int:
        return await self._consumer.num_waiting()


class _WatchedDelivery:
    def __init__(self, delivery: SampleDelivery, watch: WatchedSamples) -> None:
        self._delivery = delivery
        self._watch = watch

    @property
    def group(self) -> samples_pb2.SampleGroup:
        return self._delivery.group

    @property
    def num_deliveries(self) -> int:
        return self._delivery.num_deliveries

    async def ack(self) -> None:
        self._watch.before_ack(self.group)
        if self.group.prompt in self._watch.lost_acks:
            self._watch.lost_acks.remove(self.group.prompt)
        else:
            await self._delivery.ack()
        self._watch.note("ack", self.group)

    async def in_progress(self) -> None:
        await self._delivery.in_progress()
        self._watch.note("in progress", self.group)

    async def nak(self, *, delay_s: float = 0.0) -> None:
        await self._delivery.nak(delay_s=delay_s)
        self._watch.note("nak", self.group)

    async def dead_letter(self, reason: str) -> None:
        await self._delivery.dead_letter(reason)
        self._watch.note("dead letter", self.group)


def generated_group(
    prompt: int, *, incarnation: int = 1, iteration: int = 0, version: int = 0, rewards: Sequence[float] = (0.0, 1.0)
) -> samples_pb2.SampleGroup:
    """A group as the rollout publishes it: response `draw` has `draw + 1` tokens, each the prompt's number + 3."""
    samples = [
        samples_pb2.Sample(
            id=types_pb2.SampleId(incarnation=incarnation, iteration=iteration, prompt=prompt, draw=draw),
            response_tokens=[prompt + 3] * (draw + 1),
            engine_log_probs=[-0.5] * (draw + 1),
            versions=[samples_pb2.VersionRun(version=version, num_tokens=draw + 1)],
            finish=samples_pb2.FINISH_REASON_STOP,
            reward=reward,
        )
        for draw, reward in enumerate(rewards)
    ]
    return samples_pb2.SampleGroup(
        job=JOB,
        incarnation=incarnation,
        iteration=iteration,
        prompt=prompt,
        version=version,
        prompt_tokens=[3, 4],
        samples=samples,
    )


def ended_response(prompt: int, draw: int, *, tokens: Sequence[int] = (), **fields: Any) -> samples_pb2.SampleGroup:
    """A response of `generated_group` as the rollout tells it, or one with other tokens."""
    group = generated_group(prompt, rewards=[0.0] * (draw + 1), **fields)
    sample = group.samples[draw]
    del group.samples[:]
    group.samples.add(id=sample.id, response_tokens=tokens or sample.response_tokens)
    return group


def scored_group(prompt: int, **fields: Any) -> samples_pb2.SampleGroup:
    """A group as the inference publishes it."""
    group = generated_group(prompt, **fields)
    for sample in group.samples:
        sample.old_log_probs.extend([-1.0] * len(sample.response_tokens))
    return group
