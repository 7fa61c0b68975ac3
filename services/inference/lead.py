"""The inference's lead: has complete groups scored as they come, and sends them on to the actor.

A group is acknowledged after its scored form is on the stream, so that a new lead gets again what was not. Groups of
another incarnation than the present one are let go (older) or wait (newer). Groups that the actor will drop are sent on
as they are. Invariants: a group is scored by the version it was drawn from; it is sent on whole and once.
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
"""Enough to fill a pipeline; more would hold up the first group, which the actor may be waiting for."""
_FETCH_TIMEOUT_S = 5.0


class InferenceLead(Lead):
    """See the module."""

    def __init__(self, tools: LeadTools) -> None:
        super().__init__(tools)
        self._version: int | None = None
        self._is_busy = False
        self._rate = ScoringRate()
        self._whole = asyncio.Event()
        """All ranks of the world are up and hold a version."""

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
            await self._whole.wait()
            deliveries = await consumer.fetch(_MAX_GROUPS_A_CALL, timeout_s=_FETCH_TIMEOUT_S)
            wanted = {
                delivery.group.prompt: delivery
                for delivery in deliveries
                if await self._is_wanted(delivery, candidates)
            }
            if wanted and await self._score(list(wanted.values())):
                for prompt, delivery in wanted.items():
                    candidates.add(prompt, has_spread=has_spread(rewards_of(delivery.group)))
                await self._tell_where_it_is(consumer, candidates)

    async def _paint(self, plan: types_pb2.IterationPlan, candidates: Candidates) -> events_pb2.Inferring:
        """In fixed order the actor takes groups in the prompts' order, in whichever they came."""
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
        self._whole.set()

    async def _is_wanted(self, delivery: SampleDelivery, candidates: Candidates) -> bool:
        """Settles those that are not: let go what was superseded or is scored already, put off what is early."""
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
                f"prompt {group.prompt} of iteration {group.iteration} was drawn from version {group.version}, its "
                f"iteration is of version {self._version}"
            )
        else:
            return True
        return False

    async def _score(self, deliveries: Sequence[SampleDelivery]) -> bool:
        """False when a rank was lost: the groups wait until all ranks are up again."""
        drops = self.job.config.algorithm.filter_zero_std
        groups = [each.group for each in deliveries if not drops or has_spread(rewards_of(each.group))]
        call = wire.WorkerCall(score=wire.Score(groups=groups))
        self._is_busy = True
        try:
            replies = await self._scored(call) if groups else []
        except WorkerGone as error:
            self._log.warning("rank lost", error=str(error))
            self._whole.clear()
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

    async def _scored(self, call: wire.WorkerCall) -> list[wire.WorkerReply]:
        members, clock = self.crew.members, asyncio.get_running_loop()
        started_s = clock.time()
        replies = await self.crew.ask_all(dict.fromkeys(members, call))
        num_tokens = sum(len(sample.response_tokens) for group in call.score.groups for sample in group.samples)
        self._rate.note(num_tokens=num_tokens, num_gpus=len(members), seconds=clock.time() - started_s)
        return replies

    async def _tell_where_it_is(self, consumer: SampleConsumer, candidates: Candidates) -> None:
        await self.report_progress("score", len(candidates.seen), len(candidates.prompts))
        await self.publish(events_pb2.Backlog(queue=Stage.GENERATED, num_messages=await consumer.num_waiting()))


def _with_log_probs(
    group: samples_pb2.SampleGroup, scored: dict[SampleId, samples_pb2.Sample]
) -> samples_pb2.SampleGroup:
    """A group that was not asked for has none."""
    complete = samples_pb2.SampleGroup()
    complete.CopyFrom(group)
    for sample in complete.samples:
        answer = scored.get(decode_sample_id(sample.id), samples_pb2.Sample())
        sample.old_log_probs.extend(answer.old_log_probs)
        sample.reference_log_probs.extend(answer.reference_log_probs)
    return complete
