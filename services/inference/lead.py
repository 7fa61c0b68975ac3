"""The inference's lead: has responses scored as they end, and publishes their groups for the actor once these arrive.

The lead acknowledges a group after its scored form is on the stream. A new lead thus gets every other group again.
Each data-parallel copy scores batches of its own (`copies`, `scoring`). Copies come and go beside other commands and
while an iteration is open: a start of copies and the last batch of those that leave are tasks of their own.

Under a policy that moves GPUs, the ranks of a copy that leaves stand by, and a worker stands by on each other slot that
the inference may get (`tidegate.runtime.standbys`).

Invariants:
- A group is scored by the version from which it was drawn. [test_lead: drawn_from_another_version_is_dead_lettered]
- A group is published whole and once. [test_lead: neither_scored_nor_published_again]
- A start of copies delays no other command. [test_copies: start_of_a_copy_delays_no_other_command]
- A stop under an older grant ends no start. [test_copies: stop_under_an_older_grant]
- A copy that did not end its batch does not stand by. [test_standby_copies: hangs_as_it_leaves]
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from services.inference.copies import Copies, ScorerBuild, ScoringCopy, Weights, cut_into_copies
from services.inference.rates import ScoringRate
from services.inference.scoring import Scoring, ScoringRules
from services.inference.shares import limits_of
from tidegate.candidates import Candidates
from tidegate.codec import decode_grants, decode_layout, encode_grants
from tidegate.ports.bus import SampleConsumer, Stage
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import WorkerGone, WorkerUnreachable, together
from tidegate.runtime.lead import Command, CommandRefused, Lead, LeadTools, layout_of
from tidegate.runtime.pictures import Pictures
from tidegate.runtime.standbys import StandbyRules, Standbys
from tidegate.types import Grant, MinibatchOrder, Role
from tidegate.v1 import commands_pb2, events_pb2, types_pb2


class InferenceLead(Lead):
    def __init__(self, tools: LeadTools) -> None:
        super().__init__(tools)
        self._layout = self.job.config.layout(Role.INFERENCE)
        self._weights: Weights | None = None
        """The newest that a command named."""
        self._rate = ScoringRate()
        config = self.job.config
        self._copies = Copies(self.crew, ScorerBuild.of(config))
        rules = StandbyRules(
            Role.INFERENCE,
            slots=config.slots(Role.INFERENCE) if config.scheduler.moves_gpus else (),
            budget_bytes=config.inference.standby_memory_mib << 20,
        )
        self._standbys = Standbys(self.crew, rules, self._copies.put_to_rest)
        self._starts: dict[asyncio.Task[None], tuple[Grant, ...]] = {}
        self._departures: set[asyncio.Task[None]] = set()
        self._leaving: list[ScoringCopy] = []
        """The copies that have ended their last batch and are not released yet."""

    def check(self, command: Command) -> None:
        super().check(command)
        if isinstance(command, commands_pb2.ScaleUpRequest) and not _is_of_whole_copies(command):
            raise CommandRefused(
                f"command {command.header.id}: the {len(command.grants)} GPUs that come are not whole copies of layout "
                f"{layout_of(command)}, which are consecutive members; name all GPUs of each copy"
            )

    async def aclose(self) -> None:
        await super().aclose()
        for task in (*self._starts, *self._departures):
            await end_task(task)
        await self._standbys.aclose()
        await self._copies.aclose()

    async def scale_up(self, request: commands_pb2.ScaleUpRequest) -> None:
        """Begins the start of the copies that come."""
        self._layout = layout_of(request)
        self._meet(request.header.members)
        if request.HasField("weights"):
            self._note(request.weights, request.reference if request.HasField("reference") else None)
        grants = decode_grants(request.grants)
        await self._end_starts(grants)
        start = asyncio.create_task(self._start(request), name=f"start {request.header.id}")
        self._starts[start] = grants
        start.add_done_callback(self._starts.pop)

    async def _start(self, request: commands_pb2.ScaleUpRequest) -> None:
        try:
            coming = set(decode_grants(request.grants))
            cuts = cut_into_copies(decode_grants(request.members), layout_of(request))
            copies = [ScoringCopy(grants) for grants in cuts if coming.issuperset(grants)]
            grants = decode_grants(request.grants)
            await self._standbys.until_none_starts(grants)
            await self.crew.start(grants, transition=request.header.transition_id)
            self._standbys.note_taken(grants)
            await together(self._copies.form(copy) for copy in copies)
            # Another version may be named meanwhile.
            while self._weights is not None and any(copy.held is not self._weights for copy in copies):
                weights = self._weights
                await together(self._copies.load(copy, weights) for copy in copies if copy.held is not weights)
            self._copies.add(copies)
            await self.announce_layout(request)
            self._fill_standbys()
        except Exception as error:  # noqa: BLE001 - the edge: every error of a start becomes a Failed event
            await self.fail(f"ScaleUp {request.header.id}", error, grants=request.grants)

    async def _end_starts(self, grants: Iterable[Grant]) -> None:
        """Ends the starts under these grants and older ones. Copies that work are announced all the same."""
        tokens = {grant.gpu: grant.token for grant in grants}
        for start, coming in list(self._starts.items()):
            # A stop that a silent node did not answer is asked again: it must not end what came later to its GPU.
            is_older = any(grant.gpu in tokens and grant.token <= tokens[grant.gpu] for grant in coming)
            if is_older and not self._copies.having(coming):
                await end_task(start)

    async def scale_down(self, request: commands_pb2.ScaleDownRequest) -> None:
        """Copies that leave in a transition end their batch first. Without one, their ranks are dead or lost."""
        grants = decode_grants(request.grants)
        await self._end_starts(grants)
        leaving = self._copies.having(grants)
        if leaving and request.header.transition_id:
            for copy in leaving:
                copy.is_leaving = True
            departure = asyncio.create_task(self._depart(request, leaving), name=f"leave {request.header.id}")
            self._departures.add(departure)
            departure.add_done_callback(self._departures.discard)
            return
        for copy in leaving:
            self._copies.remove(copy)
        await super().scale_down(request)

    async def _depart(self, request: commands_pb2.ScaleDownRequest, leaving: Sequence[ScoringCopy]) -> None:
        await self._copies.until_done(leaving, timeout_s=self.job.config.runtime.command_deadline_s)
        # A copy that has lost a rank is no copy any more.
        ended = [copy for copy in leaving if copy in self._copies.all and not copy.is_busy]
        self._leaving += ended
        for copy in leaving:
            self._copies.remove(copy)
        try:
            await super().scale_down(request)
        except Exception as error:  # noqa: BLE001 - the edge: every error of a command becomes a Failed event
            await self._report_failure(request, error)
        finally:
            self._leaving = [copy for copy in self._leaving if copy not in ended]

    async def let_go(self, grants: Sequence[Grant], *, transition: str) -> int:
        """Copies that have ended their last batch stand by, where they may. Other workers end."""
        able = [copy for copy in self._leaving if set(copy.grants) <= set(grants)]
        held = await asyncio.gather(*(self._standbys.stand_down(copy.grants) for copy in able))
        stood_down = {grant for copy, num in zip(able, held, strict=True) if num is not None for grant in copy.grants}
        held_bytes = sum(num for num in held if num is not None)
        rest = [grant for grant in grants if grant not in stood_down]
        if rest:
            held_bytes += await super().let_go(rest, transition=transition)
            self._copies.note_stopped(rest)
        return held_bytes

    def _fill_standbys(self) -> None:
        leaving = {grant.gpu for copy in self._leaving for grant in copy.grants}
        coming = {grant.gpu for grants in self._starts.values() for grant in grants}
        self._standbys.fill(taken={grant.gpu for grant in self.crew.members} | leaving | coming)

    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        self._meet(request.header.members)
        self._note(request.weights, request.reference if request.HasField("reference") else None)
        assert self._weights is not None, "a LoadWeights names weights"
        lost = await self._copies.load_on_all(self._weights)
        for error in lost:
            await self.report_unreachable(error)
        if lost and not self._copies.all:
            raise WorkerGone(str(lost[0]))
        await self.publish(events_pb2.WeightsLoaded(version=request.weights.version, checksum=request.weights.checksum))
        self._fill_standbys()

    def _meet(self, members: Sequence[types_pb2.Grant]) -> None:
        """Forms the copies that an earlier lead left: those whose ranks all live. `members` are in rank order."""
        known = {grant for copy in self._copies.all for grant in copy.grants}
        coming = {grant for grants in self._starts.values() for grant in grants}
        living = {*self.crew.members} - known - coming
        cuts = cut_into_copies(decode_grants(members), self._layout)
        self._copies.add(ScoringCopy(grants) for grants in cuts if living.issuperset(grants))

    def _note(self, policy: types_pb2.Snapshot, reference: types_pb2.Snapshot | None) -> None:
        named = Weights(policy, reference)
        if self._weights is None or named.order >= self._weights.order:
            self._weights = named

    async def run_iteration(self, plan: types_pb2.IterationPlan) -> None:
        samples, job = self.tools.samples, self.tools.job_id
        consumer = await samples.consumer(
            job, Stage.GENERATED, "inference", on_dead_letter=self.tools.announcer.publish_dead_letter
        )
        candidates = await self.candidates(Stage.SCORED, plan)
        config = self.job.config
        scoring = Scoring(
            job=job,
            plan=plan,
            incarnation=self.incarnation,
            candidates=candidates,
            samples=samples,
            consumer=consumer,
            copies=self._copies,
            rate=self._rate,
            rules=ScoringRules(
                is_filtered=config.algorithm.filter_zero_std,
                max_deaths=config.runtime.max_deliveries,
                ack_wait_s=config.runtime.ack_wait_s,
                limits=limits_of(config),
                num_stages=config.inference.layout.pp,
                scores_ahead=config.scores_ahead,
            ),
            lost=self._report_lost,
            note_progress=partial(self._report_scored, consumer, candidates),
        )
        async with Pictures(partial(self._paint, plan, candidates, scoring), self.publish, self.pace).updates():
            await scoring.run()
        await self.publish(events_pb2.IterationReported())

    async def _paint(
        self, plan: types_pb2.IterationPlan, candidates: Candidates, scoring: Scoring
    ) -> events_pb2.Inferring:
        """The picture, with groups in the actor's order: the order of prompts in fixed order, else that of arrival."""
        is_fixed = self.job.config.algorithm.minibatch_order is MinibatchOrder.FIXED
        prompts = sorted(candidates.seen) if is_fixed else candidates.seen
        return events_pb2.Inferring(
            ready=[prompt - plan.first_prompt for prompt in prompts],
            is_busy=self._copies.is_busy,
            rate_tokens_per_s_per_gpu=self._rate.tokens_per_s_per_gpu(),
            num_tokens_ahead=scoring.num_tokens_ahead,
        )

    async def close_iteration(self, request: commands_pb2.CloseIterationRequest) -> None:
        if self._weights is not None:
            held = [copy.version for copy in self._copies.all if copy.version is not None]
            before = min([self._weights.policy.version, *held])
            await self.crew.drop_snapshots(before_version=before, keep=self.versions_to_keep)
        if self.crew.standbys:
            await self.crew.forget_dead()
        self._fill_standbys()

    async def _report_lost(self, copy: ScoringCopy, error: Exception) -> None:
        """A death is its instance's to report. Of a copy that is late, or refuses its batch, only the lead knows."""
        if isinstance(error, WorkerUnreachable) or not isinstance(error, WorkerGone):
            await self.fail(f"the copy on {copy}", error, grants=encode_grants(copy.grants))

    async def _report_scored(self, consumer: SampleConsumer, candidates: Candidates) -> None:
        await self.report_progress("score", len(candidates.seen), len(candidates.prompts))
        await self.publish(events_pb2.Backlog(queue=Stage.GENERATED, num_messages=await consumer.num_waiting()))


def _is_of_whole_copies(request: commands_pb2.ScaleUpRequest) -> bool:
    coming = set(decode_grants(request.grants))
    cuts = cut_into_copies(decode_grants(request.members), decode_layout(request.layout))
    return coming == {grant for grants in cuts if coming.issuperset(grants) for grant in grants}
