"""The scoring of one iteration: groups are taken from the stream, dealt to idle copies, and published scored.

The groups of an older incarnation or iteration are acknowledged unscored, those of a newer one delayed. Groups that the
actor will filter are published as they are, without log-probabilities.

Order, for each group:
1. It is taken into the lead's hand, and kept alive there.
2. An idle copy scores it in a batch; where copies would have nothing, several score a share of it each.
3. Its scored form is stored on the stream.
4. It is acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from services.inference.copies import Copies, ScoringCopy
from services.inference.hand import Hand
from services.inference.rates import ScoringRate
from services.inference.shares import HeldGroup, Share
from tidegate.candidates import Candidates, has_spread
from tidegate.codec import decode_sample_id
from tidegate.megatron.batching import BatchLimits
from tidegate.ports.bus import SampleConsumer, SampleDelivery, SampleStream, Stage
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import WorkerGone, WorkerRefused
from tidegate.runtime.keep_alive import keep_alive
from tidegate.runtime.lead import redelivery_delay_s, rewards_of
from tidegate.v1 import samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

_FETCH_TIMEOUT_S = 5.0

Lost = Callable[[ScoringCopy, Exception], Awaitable[None]]
"""Told of the copy and the error that it died of."""


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """The job's settings that the scoring obeys. After `max_deaths` copies a group that was with them is set aside."""

    is_filtered: bool
    max_deaths: int
    ack_wait_s: float
    limits: BatchLimits
    """The limits of the copies' micro-batches."""
    num_stages: int = 1
    """The stages of a copy's pipeline."""


@dataclass(slots=True)
class Scoring:
    """One iteration's scoring. `lost` is told of copies that die; `note_progress` after each batch."""

    plan: types_pb2.IterationPlan
    incarnation: int
    candidates: Candidates
    samples: SampleStream
    consumer: SampleConsumer
    copies: Copies
    rate: ScoringRate
    rules: ScoringRules
    lost: Lost
    note_progress: Callable[[], Awaitable[None]]
    _hand: Hand = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _fetching: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._hand = Hand(self.rules.limits, num_stages=self.rules.num_stages)

    async def run(self) -> None:
        """Returns when all candidates are published."""
        keeping = asyncio.create_task(
            keep_alive(lambda: self._hand.deliveries, ack_wait_s=self.rules.ack_wait_s), name="keep groups alive"
        )
        try:
            while not self.candidates.is_complete:
                self.copies.changed.clear()
                self._deal()
                await self.copies.changed.wait()
                self._raise_failures()
            await asyncio.gather(*self._tasks)
        finally:
            for task in (keeping, *self._tasks, *([self._fetching] if self._fetching else ())):
                await end_task(task)

    def _deal(self) -> None:
        """Every idle copy gets a batch. Copies that stay idle are why more groups are taken from the stream."""
        idle = self.copies.idle(self.plan.version)
        while idle and (batch := self._hand.deal(num_idle=len(idle))):
            copy = idle.pop(0)
            scoring = self.copies.begin(copy, [share.group for share in batch])
            self._begin(self._finish(copy, batch, scoring), f"finish on {copy}")
        # Fetch only where a group is still to come: a fetch that outlives the iteration would lose what it gets.
        is_due = any(
            prompt not in self.candidates.seen and prompt not in self._hand for prompt in self.candidates.prompts
        )
        if idle and is_due and self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch(len(idle)), name="fetch groups")
            self._fetching.add_done_callback(lambda _: self.copies.changed.set())

    def _begin(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self.copies.changed.set())

    def _raise_failures(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()
        if self._fetching is not None and self._fetching.done():
            fetched, self._fetching = self._fetching, None
            fetched.result()

    async def _fetch(self, num_idle: int) -> None:
        deliveries = await self.consumer.fetch(num_idle * self._hand.max_batches, timeout_s=_FETCH_TIMEOUT_S)
        unscored = [each for each in deliveries if await self._accepts(each) and not self._takes(each)]
        for delivery in unscored:
            await self._publish(delivery.group, delivery)
        if unscored:
            await self.note_progress()

    def _takes(self, delivery: SampleDelivery) -> bool:
        """Takes a group into the hand; False for one that the actor will filter."""
        if self.rules.is_filtered and not has_spread(rewards_of(delivery.group)):
            return False
        self._hand.add(delivery)
        return True

    async def _accepts(self, delivery: SampleDelivery) -> bool:
        """Whether the group is to be published. Settles any other: acks an old or repeated one, delays an early one."""
        group, candidates = delivery.group, self.candidates
        now = (self.incarnation, self.plan.iteration)
        if (group.incarnation, group.iteration) > now:
            await delivery.nak(delay_s=redelivery_delay_s(delivery.num_deliveries))
        elif (group.incarnation, group.iteration) < now or group.prompt in candidates.seen:
            await delivery.ack()
        elif group.prompt not in candidates.possible:
            await delivery.dead_letter(
                f"prompt {group.prompt} is not of iteration {group.iteration}, which takes "
                f"{candidates.possible[0]}-{candidates.possible[-1]}"
            )
        elif group.version != self.plan.version:
            await delivery.dead_letter(
                f"prompt {group.prompt} of iteration {group.iteration} was drawn from version {group.version}, "
                f"but its iteration is of version {self.plan.version}"
            )
        else:
            return True
        return False

    async def _finish(
        self, copy: ScoringCopy, batch: Sequence[Share], scoring: asyncio.Task[list[wire.WorkerReply]]
    ) -> None:
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        try:
            # The copy ends its batch though the iteration is superseded: see `copies`.
            replies = await asyncio.shield(scoring)
        except (WorkerGone, WorkerRefused, TimeoutError) as error:
            await self._lose(copy, batch, error)
            return
        copy.num_calls += 1
        if copy.num_calls > 1:
            num_tokens = sum(share.num_tokens for share in batch)
            self.rate.note(num_tokens=num_tokens, num_gpus=len(copy.grants), seconds=clock.time() - started_s)
        answered = [group for reply in replies for group in reply.scored.groups]
        for share in batch:
            own = (sample for group in answered if group.prompt == share.held.prompt for sample in group.samples)
            if self._hand.note_scored(share, {decode_sample_id(sample.id): sample for sample in own}):
                await self._publish(_with_log_probs(share.held), share.held.delivery)
                self._hand.remove(share.held)
        await self.note_progress()

    async def _lose(self, copy: ScoringCopy, batch: Sequence[Share], error: Exception) -> None:
        is_leaving = copy.is_leaving
        structlog.get_logger("Scoring").warning(
            "copy lost", copy=str(copy), num_shares=len(batch), is_leaving=is_leaving, error=str(error)
        )
        self.copies.remove(copy)
        self._hand.give_back(batch, died=not is_leaving)
        self.copies.changed.set()
        for held in {share.held.prompt: share.held for share in batch}.values():
            if held.prompt in self._hand and held.num_deaths >= self.rules.max_deaths:
                self._hand.remove(held)
                await held.delivery.dead_letter(
                    f"each of the {held.num_deaths} copies that had prompt {held.prompt} died; see their logs"
                )
        if not is_leaving:
            await self.lost(copy, error)

    async def _publish(self, group: samples_pb2.SampleGroup, delivery: SampleDelivery) -> None:
        await self.samples.publish(Stage.SCORED, group)
        await delivery.ack()
        self.candidates.add(group.prompt, has_spread=has_spread(rewards_of(group)))


def _with_log_probs(held: HeldGroup) -> samples_pb2.SampleGroup:
    """The group with its log-probabilities."""
    complete = samples_pb2.SampleGroup()
    complete.CopyFrom(held.delivery.group)
    for sample in complete.samples:
        answer = held.scored[decode_sample_id(sample.id)]
        sample.old_log_probs.extend(answer.old_log_probs)
        sample.reference_log_probs.extend(answer.reference_log_probs)
    return complete
