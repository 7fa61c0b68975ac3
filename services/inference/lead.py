"""The inference's lead: has complete groups scored as they arrive, and publishes them for the actor.

The lead acknowledges a group after its scored form is on the stream. A new lead thus gets every other group again. The
lead acknowledges groups of an older incarnation unscored, and delays groups of a newer one. It publishes groups that
the actor will filter as they are, without log-probabilities.

Invariants:
- A group is scored by the version from which it was drawn. [test_lead: drawn_from_another_version_is_dead_lettered]
- A group is published whole and once. [test_lead: neither_scored_nor_published_again]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from services.inference.rates import ScoringRate
from tidegate.candidates import Candidates, has_spread
from tidegate.codec import decode_grants, decode_sample_id, encode_layout
from tidegate.ports.bus import SampleConsumer, SampleDelivery, Stage
from tidegate.runtime.crew import WorkerGone
from tidegate.runtime.lead import Lead, LeadTools, layout_of, redelivery_delay_s, rewards_of
from tidegate.runtime.pictures import Pictures
from tidegate.types import MinibatchOrder, SampleId
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

_MAX_GROUPS_A_CALL = 8
"""Enough to fill a pipeline. More would delay the first group, for which the actor may be waiting."""
_FETCH_TIMEOUT_S = 5.0


class InferenceLead(Lead):
    def __init__(self, tools: LeadTools) -> None:
        super().__init__(tools)
        self._version: int | None = None
        self._is_busy = False
        self._rate = ScoringRate()
        self._is_ready = asyncio.Event()
        """Set while all ranks of the world live and hold a version."""

    async def scale_up(self, request: commands_pb2.ScaleUpRequest) -> None:
        grants, members = decode_grants(request.grants), decode_grants(request.members)
        await self.crew.start(grants, transition=request.header.transition_id)
        timeout_s = self.job.config.runtime.collective_timeout_s
        seats = await self.crew.rendezvous(members, timeout_s=timeout_s)
        layout = encode_layout(layout_of(request))
        await self.crew.ask_all(
            {
                grant: wire.WorkerCall(
                    start_scorer=wire.StartScorer(rendezvous=seat, layout=layout, config_json=request.config_json)
                )
                for grant, seat in zip(members, seats, strict=True)
            }
        )
        if request.HasField("weights"):
            await self._load(request.weights, request.reference if request.HasField("reference") else None)
        await self.announce_layout(request)

    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        await self._load(request.weights, request.reference if request.HasField("reference") else None)
        await self.publish(events_pb2.WeightsLoaded(version=request.weights.version, checksum=request.weights.checksum))

    async def run_iteration(self, plan: types_pb2.IterationPlan) -> None:
        samples, job = self.tools.samples, self.tools.job_id
        consumer = await samples.consumer(
            job, Stage.GENERATED, "inference", on_dead_letter=self.tools.announcer.publish_dead_letter
        )
        candidates = await self.candidates(Stage.SCORED, plan)
        pictures = Pictures(partial(self._paint, plan, candidates), self.publish, self.pace)
        async with pictures.updates():
            await self._score_all(consumer, candidates)
        await self.publish(events_pb2.IterationReported())

    async def _score_all(self, consumer: SampleConsumer, candidates: Candidates) -> None:
        while not candidates.is_complete:
            await self._is_ready.wait()
            deliveries = await consumer.fetch(_MAX_GROUPS_A_CALL, timeout_s=_FETCH_TIMEOUT_S)
            accepted = {
                delivery.group.prompt: delivery for delivery in deliveries if await self._accepts(delivery, candidates)
            }
            if accepted and await self._score(list(accepted.values())):
                for prompt, delivery in accepted.items():
                    candidates.add(prompt, has_spread=has_spread(rewards_of(delivery.group)))
                await self._publish_state(consumer, candidates)

    async def _paint(self, plan: types_pb2.IterationPlan, candidates: Candidates) -> events_pb2.Inferring:
        """The picture, with groups in the actor's order: the order of prompts in fixed order, else that of arrival."""
        is_fixed = self.job.config.algorithm.minibatch_order is MinibatchOrder.FIXED
        prompts = sorted(candidates.seen) if is_fixed else candidates.seen
        return events_pb2.Inferring(
            ready=[prompt - plan.first_prompt for prompt in prompts],
            is_busy=self._is_busy,
            rate_tokens_per_s_per_gpu=self._rate.tokens_per_s_per_gpu(),
        )

    async def close_iteration(self, request: commands_pb2.CloseIterationRequest) -> None:
        if self._version is not None:
            await self.crew.drop_snapshots(before_version=self._version, keep=self.versions_to_keep)

    async def _load(self, weights: types_pb2.Snapshot, reference: types_pb2.Snapshot | None) -> None:
        if reference is not None:
            await self.crew.load(reference, self.crew.members, reference=True)
        await self.crew.load(weights, self.crew.members)
        self._version = weights.version
        self._is_ready.set()

    async def _accepts(self, delivery: SampleDelivery, candidates: Candidates) -> bool:
        """Whether to score a group. Settles any other: acks an old or repeated one, delays an early one."""
        group = delivery.group
        now = (self.incarnation, self.iteration)
        if (group.incarnation, group.iteration) > now:
            await delivery.nak(delay_s=redelivery_delay_s(delivery.num_deliveries))
        elif (group.incarnation, group.iteration) < now or group.prompt in candidates.seen:
            await delivery.ack()
        elif group.prompt not in candidates.possible:
            await delivery.dead_letter(
                f"prompt {group.prompt} is not of iteration {group.iteration}, which takes "
                f"{candidates.possible[0]}-{candidates.possible[-1]}"
            )
        elif group.version != self._version:
            await delivery.dead_letter(
                f"prompt {group.prompt} of iteration {group.iteration} was drawn from version {group.version}, "
                f"but its iteration is of version {self._version}"
            )
        else:
            return True
        return False

    async def _score(self, deliveries: Sequence[SampleDelivery]) -> bool:
        """Score and publish groups. False when a rank was lost: the groups wait until all ranks live again."""
        is_filtered = self.job.config.algorithm.filter_zero_std
        groups = [each.group for each in deliveries if not is_filtered or has_spread(rewards_of(each.group))]
        call = wire.WorkerCall(score=wire.Score(groups=groups))
        self._is_busy = True
        try:
            replies = await self._ask_all(call) if groups else []
        except WorkerGone as error:
            self._log.warning("rank lost", error=str(error))
            self._is_ready.clear()
            await self.report_unreachable(error)
            await asyncio.gather(*(delivery.nak() for delivery in deliveries))
            return False
        finally:
            self._is_busy = False
        scored = {
            decode_sample_id(sample.id): sample
            for reply in replies
            for group in reply.scored.groups
            for sample in group.samples
        }
        for delivery in deliveries:
            await self.tools.samples.publish(Stage.SCORED, _with_log_probs(delivery.group, scored))
            await delivery.ack()
        return True

    async def _ask_all(self, call: wire.WorkerCall) -> list[wire.WorkerReply]:
        members, clock = self.crew.members, asyncio.get_running_loop()
        started_s = clock.time()
        replies = await self.crew.ask_all(dict.fromkeys(members, call))
        num_tokens = sum(len(sample.response_tokens) for group in call.score.groups for sample in group.samples)
        self._rate.note(num_tokens=num_tokens, num_gpus=len(members), seconds=clock.time() - started_s)
        return replies

    async def _publish_state(self, consumer: SampleConsumer, candidates: Candidates) -> None:
        await self.report_progress("score", len(candidates.seen), len(candidates.prompts))
        await self.publish(events_pb2.Backlog(queue=Stage.GENERATED, num_messages=await consumer.num_waiting()))


def _with_log_probs(
    group: samples_pb2.SampleGroup, scored: dict[SampleId, samples_pb2.Sample]
) -> samples_pb2.SampleGroup:
    """The group with its log-probabilities. A group that was not scored gets none."""
    complete = samples_pb2.SampleGroup()
    complete.CopyFrom(group)
    for sample in complete.samples:
        answer = scored.get(decode_sample_id(sample.id), samples_pb2.Sample())
        sample.old_log_probs.extend(answer.old_log_probs)
        sample.reference_log_probs.extend(answer.reference_log_probs)
    return complete
