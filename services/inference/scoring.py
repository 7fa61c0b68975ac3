"""The scoring of one iteration: groups are taken from the stream, dealt to idle copies, and published scored.

Where nothing of a group waits, in the hand or on the stream, idle copies score responses that ended ahead of their
groups. They are told at most once, and nothing depends on them: what was not scored ahead is scored with its group.
Responses of another incarnation, iteration, version or prompt are left out.

The groups of an older incarnation or iteration are acknowledged unscored, those of a newer one delayed. Groups that the
actor will filter are published as they are, without log-probabilities.

Order, for each group:
1. It is taken into the lead's hand, and kept alive there. What was scored of it ahead stays scored.
2. An idle copy scores the rest in a batch; where copies would have nothing, several score a share of it each.
3. Its scored form is stored on the stream.
4. It is acknowledged.

Invariants:
- A response that is told has no effect but that it is scored earlier. [test_ahead: published_whole_and_once]
- An idle copy scores groups before responses ahead of theirs. [test_ahead: groups_on_the_stream_come_first]
- A response that is told puts no group among the dead letters. [test_ahead: kills_its_copies]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
from tidegate.types import JobId
from tidegate.v1 import samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

_FETCH_TIMEOUT_S = 5.0

Lost = Callable[[ScoringCopy, Exception], Awaitable[None]]
"""Told of the copy and the error that it died of."""


class Deal(Protocol):
    def __call__(self, *, num_idle: int) -> tuple[Share, ...]: ...


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
    scores_ahead: bool = True
    """Whether responses are scored ahead of their groups."""


@dataclass(slots=True)
class Scoring:
    """One iteration's scoring. `lost` is told of copies that die; `note_progress` after each batch."""

    job: JobId
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
    _has_looked: bool = False
    """Whether the fetch under way found no group on the stream and waits for the next."""

    def __post_init__(self) -> None:
        self._hand = Hand(self.rules.limits, num_stages=self.rules.num_stages)

    @property
    def num_tokens_ahead(self) -> int:
        """The tokens of responses that were scored ahead of groups that are not published."""
        return self._hand.num_tokens_ahead

    async def run(self) -> None:
        """Returns when all candidates are published."""
        helping = [
            asyncio.create_task(
                keep_alive(lambda: self._hand.deliveries, ack_wait_s=self.rules.ack_wait_s), name="keep groups alive"
            )
        ]
        if self.rules.scores_ahead:
            helping.append(asyncio.create_task(self._listen(), name="listen to responses"))
        try:
            while not self.candidates.is_complete:
                self.copies.changed.clear()
                self._deal()
                await self.copies.changed.wait()
                self._raise_failures()
            await asyncio.gather(*self._tasks)
        finally:
            for task in (*helping, *self._tasks, *([self._fetching] if self._fetching else ())):
                await end_task(task)

    def _deal(self) -> None:
        """Every idle copy gets a batch. Copies that stay idle are why more groups are taken from the stream.

        While the stream has none, these score responses ahead of their groups."""
        idle = self.copies.idle(self.plan.version)
        self._deal_to(idle, self._hand.deal)
        if not idle:
            return
        # Fetch only where a group is still to come: a fetch that outlives the iteration would lose what it gets.
        is_due = any(
            prompt not in self.candidates.seen and prompt not in self._hand for prompt in self.candidates.prompts
        )
        if is_due and self._fetching is None:
            self._has_looked = False
            self._fetching = asyncio.create_task(self._fetch(len(idle)), name="fetch groups")
            self._fetching.add_done_callback(lambda _: self.copies.changed.set())
        # Avoid a copy that scores ahead while groups wait on the stream.
        if self._has_looked or not is_due:
            self._deal_to(idle, self._hand.deal_ahead)

    def _deal_to(self, idle: list[ScoringCopy], deal: Deal) -> None:
        """Takes the copies that get a batch out of `idle`."""
        while idle and (batch := deal(num_idle=len(idle))):
            copy = idle.pop(0)
            scoring = self.copies.begin(copy, [share.group for share in batch])
            self._begin(self._finish(copy, batch, scoring), f"finish on {copy}")

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
        max_groups = num_idle * self._hand.max_batches
        deliveries = await self.consumer.fetch(max_groups, timeout_s=0.0)
        if not deliveries:
            self._has_looked = True
            self.copies.changed.set()
            deliveries = await self.consumer.fetch(max_groups, timeout_s=_FETCH_TIMEOUT_S)
            self._has_looked = False
        taken = [(self._take(each), each) for each in deliveries if await self._accepts(each)]
        ready = [(group, delivery) for group, delivery in taken if group is not None]
        for group, delivery in ready:
            await self._publish(group, delivery)
        if ready:
            await self.note_progress()

    def _take(self, delivery: SampleDelivery) -> samples_pb2.SampleGroup | None:
        """Takes a group into the hand. Returns it where nothing of it is to be scored, as it is to be published."""
        if self.rules.is_filtered and not has_spread(rewards_of(delivery.group)):
            self._hand.remove(delivery.group.prompt)
            return delivery.group
        scored = self._hand.add(delivery)
        return None if scored is None else _with_log_probs(scored)

    async def _listen(self) -> None:
        """Takes the responses that are told, until it is cancelled."""
        here = (self.incarnation, self.plan.iteration, self.plan.version)
        async with self.samples.responses(self.job) as responses:
            async for group in responses:
                is_candidate = group.prompt in self.candidates.possible and group.prompt not in self.candidates.seen
                if is_candidate and (group.incarnation, group.iteration, group.version) == here:
                    self._hand.add_ahead(group)
                    self.copies.changed.set()

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
            self._hand.remove(group.prompt)
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
        answers = {
            decode_sample_id(sample.id): sample
            for reply in replies
            for group in reply.scored.groups
            for sample in group.samples
        }
        scored = [share.held for share in batch if self._hand.note_scored(share, answers)]
        for held in scored:
            assert held.delivery is not None, "only a delivered group is scored whole"
            await self._publish(_with_log_probs(held), held.delivery)
        if scored:
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
            if is_leaving or held.num_deaths < self.rules.max_deaths:
                continue
            if held.delivery is None:
                self._hand.keep_for_delivery(held)
            elif held.prompt in self._hand:
                self._hand.remove(held.prompt)
                await held.delivery.dead_letter(
                    f"each of the {held.num_deaths} copies that had prompt {held.prompt} died; see their logs"
                )
        if not is_leaving:
            await self.lost(copy, error)

    async def _publish(self, group: samples_pb2.SampleGroup, delivery: SampleDelivery) -> None:
        await self.samples.publish(Stage.SCORED, group)
        await delivery.ack()
        self.candidates.add(group.prompt, has_spread=has_spread(rewards_of(group)))
        self._hand.remove(group.prompt)


def _with_log_probs(held: HeldGroup) -> samples_pb2.SampleGroup:
    """The group with its log-probabilities."""
    complete = samples_pb2.SampleGroup()
    complete.CopyFrom(held.group)
    for sample in complete.samples:
        answer = held.responses[decode_sample_id(sample.id)].answer
        assert answer is not None, "the group is scored"
        sample.old_log_probs.extend(answer.old_log_probs)
        sample.reference_log_probs.extend(answer.reference_log_probs)
    return complete
