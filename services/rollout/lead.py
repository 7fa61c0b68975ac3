"""The rollout's lead: assigns an iteration's prompts to engines and publishes each group as soon as it is complete.

It tells the inference of responses that end ahead of their groups (`early_responses`).

The lead keeps every engine as full as it can run. Engines come and go beside all other commands. An engine that leaves
hands over its unfinished responses, and the others continue them (`partials`). When an engine is lost, the others make
its requests. A new engine takes part at once.

A new lead asks the stream for the published groups and makes only the others; it starts an evaluation anew. Where the
plan has extra prompts, they replace groups without spread (`tidegate.candidates`). The copy of a group on the stream
decides whether it has spread.

Where engines repeat draws, a response is the same in every engine, because its seed is derived from its id.

Invariants:
- A group is published whole and once. [test_lead: published_whole_and_once]
- Every response of an iteration is drawn from the iteration's version. [test_lead: holds_the_version_of_the_iteration]
- A response that moves has the bits of one that does not, where engines repeat draws.
  [test_moves: same_bits_wherever_it_moves]
- A start or a release of an engine delays no other command. [test_fleet: delays_no_other_command]
- An evaluation publishes nothing on the stream and changes no account. [test_evaluation: puts_nothing_on_the_stream]
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial

from services.rollout.early_responses import early_responses
from services.rollout.evaluation import Evaluation
from services.rollout.exercises import Exercises, open_exercises
from services.rollout.failed_rewards import FailedRewards
from services.rollout.fleet import Fleet
from services.rollout.generation_picture import GenerationPicture
from services.rollout.generation_state import EngineSlot, GenerationState
from services.rollout.group_order import GroupOrder, order_fault
from services.rollout.groups import GroupsInProgress
from services.rollout.partials import finish_of
from services.rollout.progress import EngineProgress, IterationProgress
from services.rollout.seating import seats
from tidegate.candidates import Candidates, has_spread
from tidegate.codec import decode_grants, decode_sample_id, encode_grants, encode_sample_id, fate_of
from tidegate.config.checks.evaluation import longest_evaluated
from tidegate.ports.bus import Stage
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import WorkerGone
from tidegate.runtime.lead import Command, CommandRefused, Lead, LeadTools, rewards_of
from tidegate.runtime.pictures import Pictures
from tidegate.types import Grant, SampleId
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

_QUEUED_AHEAD = 17 / 16
"""The requests that an engine holds, over those that it runs at once.

The next request thus starts without a round trip. More would wait for this engine while another has a place."""


class RolloutLead(Lead):
    can_evaluate = True
    can_order = True

    def __init__(self, tools: LeadTools) -> None:
        super().__init__(tools)
        self._fleet = Fleet(self.crew, self.job.config, incarnation=lambda: self.incarnation)
        self._starts: dict[tuple[Grant, ...], asyncio.Task[None]] = {}
        """The starts at work, by the grants that come."""
        self._releases: set[asyncio.Task[None]] = set()
        self._orders: dict[int, GroupOrder] = {}
        """The last order of the open iteration, and of iterations that are still to open."""
        self._generation: GenerationState | None = None
        self._exercises: Exercises | None = None
        self._mean_tokens: dict[int, float] = {}
        """The mean tokens of the last responses that this lead saw, by row of the data."""

    async def aclose(self) -> None:
        await super().aclose()
        for task in (*self._starts.values(), *self._releases):
            await end_task(task)
        await self._fleet.aclose()
        if self._exercises is not None:
            self._exercises.close()
            self._exercises = None

    def check(self, command: Command) -> None:
        super().check(command)
        if not isinstance(command, commands_pb2.OrderGroupsRequest):
            return
        header, algorithm = command.header, self.job.config.algorithm
        if header.incarnation == self.incarnation and command.iteration < self.iteration:
            raise CommandRefused(
                f"command {header.id} orders iteration {command.iteration}, the rollout is at {self.iteration}"
            )
        most = algorithm.prompts_per_iteration + algorithm.max_extra_prompts
        if (fault := order_fault(command.groups, num_groups=most)) is not None:
            raise CommandRefused(f"command {header.id}: the order of iteration {command.iteration} {fault}")

    async def order_groups(self, request: commands_pb2.OrderGroupsRequest) -> None:
        iteration = request.iteration
        self._orders[iteration] = GroupOrder(request.header.incarnation, iteration, tuple(request.groups))
        if self._generation is not None and self._generation.progress is not None:
            self._put_in_order(self._generation)

    async def scale_up(self, request: commands_pb2.ScaleUpRequest) -> None:
        """Start the engines in the background: a start may take long, and no other command waits for it."""
        grants = decode_grants(request.grants)
        if grants in self._starts:
            return
        task = asyncio.create_task(
            self._change(request, partial(self._start, request)), name=f"start {request.header.id}"
        )
        self._starts[grants] = task
        task.add_done_callback(lambda _: self._starts.pop(grants, None))

    async def scale_down(self, request: commands_pb2.ScaleDownRequest) -> None:
        """Release the engines in the background. Engines that are still starting are ended first."""
        grants = decode_grants(request.grants)
        if self._fleet.is_leaving(grants):
            return
        leaving = self._fleet.leave(grants)
        await self._end_starts_of(grants)
        task = asyncio.create_task(
            self._change(request, partial(self._release, request, leaving)), name=f"release {request.header.id}"
        )
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def let_go(self, grants: Sequence[Grant], *, transition: str) -> int:
        return await self._fleet.let_go(grants, transition=transition)

    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        await self._fleet.load(request.weights, decode_grants(request.header.members))
        if not self._fleet.slots and self._starts:
            # No engine is at work yet, so this one is the first to hold the version.
            await asyncio.wait(list(self._starts.values()))
        self._note_engines()
        await self.publish(events_pb2.WeightsLoaded(version=request.weights.version, checksum=request.weights.checksum))
        self._fleet.fill_standbys()

    async def run_iteration(self, plan: types_pb2.IterationPlan) -> None:
        exercises = await self._opened_exercises()
        candidates = await self.candidates(Stage.GENERATED, plan)
        remaining = tuple(prompt for prompt in candidates.prompts if prompt not in candidates.seen)
        generation = GenerationState(
            version=plan.version,
            groups=GroupsInProgress(self.incarnation, plan.iteration, remaining, plan.group_size),
            request=partial(self._request, exercises),
            max_new_tokens=self.job.config.algorithm.max_new_tokens,
            settle=partial(self._publish, plan, exercises, await self._failures(plan, candidates)),
            progress=self._new_progress(plan, exercises, candidates),
        )
        self._orders = {each: order for each, order in self._orders.items() if each >= plan.iteration}
        self._put_in_order(generation)
        async with self._pictures(generation, candidates), self._early_responses(plan, exercises, generation):
            await self._generate(generation)
        await self._report(plan)

    async def evaluate(self, plan: types_pb2.EvaluationPlan) -> None:
        exercises = await self._opened_exercises()
        evaluation = Evaluation(self.job, await asyncio.to_thread(exercises.held_out), version=plan.version)
        prompts, num_samples = tuple(range(evaluation.num_prompts)), evaluation.samples_per_prompt
        generation = GenerationState(
            version=plan.version,
            groups=GroupsInProgress(self.incarnation, plan.iteration, prompts, num_samples),
            request=evaluation.request,
            max_new_tokens=longest_evaluated(self.job.config),
            settle=partial(self._judge, evaluation),
        )
        await self._generate(generation)
        await asyncio.to_thread(evaluation.write, self.tools.folder.evaluations)
        await self.publish(evaluation.report())

    async def supersede(self) -> None:
        abort = wire.WorkerCall(abort=wire.Abort())
        await asyncio.gather(*(self.crew.ask(grant, abort) for grant in self._fleet.started), return_exceptions=True)

    async def close_iteration(self, request: commands_pb2.CloseIterationRequest) -> None:
        if versions := self._fleet.versions:
            await self.crew.drop_snapshots(before_version=min(versions), keep=self.versions_to_keep)
        if self.crew.standbys:
            await self.crew.forget_dead()
        self._fleet.fill_standbys()

    async def _stop_started(self, request: commands_pb2.ScaleUpRequest) -> None:
        """The start itself stops what an earlier lead began, so that no other command waits."""

    async def _start(self, request: commands_pb2.ScaleUpRequest) -> None:
        # The scheduler has given up an earlier start whose GPUs it grants anew.
        await self._end_starts_of(decode_grants(request.grants))
        await self._fleet.start(request)
        self._note_engines()
        await self.announce_layout(request)
        self._fleet.fill_standbys()

    async def _release(self, request: commands_pb2.ScaleDownRequest, leaving: Sequence[EngineSlot]) -> None:
        self._note_engines()
        num_held = sum(slot.num_held for slot in leaving)
        await asyncio.gather(*(self._fleet.hand_over(slot) for slot in leaving))
        num_lost = sum(slot.num_lost_tokens for slot in leaving)
        if num_held:
            gpus = [slot.grant.gpu for slot in leaving]
            self._log.info("engines handed over", gpus=gpus, num_requests=num_held, num_lost_tokens=num_lost)
        if self._generation is not None:
            self._generation.partials.num_lost_tokens += num_lost
            self._generation.groups.give_back(sample for slot in leaving for sample in slot.handed_over)
        self._note_engines()
        await super().scale_down(request)
        self._fleet.fill_standbys()

    async def _change(self, command: Command, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the edge: every error of a command becomes a Failed event
            await self._report_failure(command, error)

    async def _end_starts_of(self, grants: Sequence[Grant]) -> None:
        """End all other starts of these grants, and of earlier ones of their GPUs.

        What else they would have started is reported: only a new start brings it.
        """
        newest = {grant.gpu: grant.token for grant in grants}
        for started, task in list(self._starts.items()):
            own = [grant for grant in started if grant.gpu in newest and grant.token <= newest[grant.gpu]]
            if not own or task is asyncio.current_task():
                continue
            await end_task(task)
            if others := [grant for grant in started if grant not in own]:
                error = WorkerGone(f"the start with {', '.join(grant.gpu for grant in grants)} was ended")
                await self.fail("start", error, grants=encode_grants(others))

    def _note_engines(self) -> None:
        """The engines at work have changed: assign anew, and show it."""
        if self._generation is not None:
            self._generation.changed.set()
            self._generation.note_change()

    def _put_in_order(self, generation: GenerationState) -> None:
        groups, progress = generation.groups, generation.progress
        assert progress is not None, "only iterations have an order"
        first_prompt, iteration = progress.first_prompt, groups.iteration
        order = self._orders.get(iteration, GroupOrder())
        groups.order(order.prompts(incarnation=self.incarnation, iteration=iteration, first_prompt=first_prompt))

    def _new_progress(
        self, plan: types_pb2.IterationPlan, exercises: Exercises, candidates: Candidates
    ) -> IterationProgress:
        rows = ((prompt, exercises.row(prompt)) for prompt in candidates.possible)
        hints = {prompt: self._mean_tokens[row] for prompt, row in rows if row in self._mean_tokens}
        max_running = self.job.config.rollout.max_running_requests
        for slot in self._fleet.slots.values():
            slot.progress.begin()
        return IterationProgress(plan.first_prompt, plan.group_size, max_running, hints)

    @asynccontextmanager
    async def _pictures(self, generation: GenerationState, candidates: Candidates) -> AsyncIterator[None]:
        assert generation.progress is not None, "an iteration has progress to show"
        engines = partial(self._engines_of, generation)
        picture = GenerationPicture(
            self.crew, engines, generation.groups, candidates, generation.progress, generation.partials
        )
        pictures = Pictures(picture.paint, self.publish, self.pace)
        generation.note_change = pictures.note_change
        async with pictures.updates():
            yield

    @asynccontextmanager
    async def _early_responses(
        self, plan: types_pb2.IterationPlan, exercises: Exercises, generation: GenerationState
    ) -> AsyncIterator[None]:
        if not self.job.config.scores_ahead:
            yield
            return
        async with early_responses(self.tools.samples) as tell:

            def tell_ended(response: samples_pb2.Sample) -> None:
                alone = samples_pb2.Sample(id=response.id, response_tokens=response.response_tokens)
                tell(self._group(plan, response.id.prompt, exercises, [alone]))

            generation.tell = tell_ended
            yield

    def _engines_of(self, generation: GenerationState) -> list[tuple[Grant, EngineProgress]]:
        return [(slot.grant, slot.progress) for slot in self._fleet.at_work(generation.version)]

    async def _opened_exercises(self) -> Exercises:
        if self._exercises is None:
            self._exercises = await open_exercises(self.job)
        return self._exercises

    async def _generate(self, generation: GenerationState) -> None:
        """Generate until every group is made and settled."""
        self._generation = generation
        try:
            # A complete group must still be settled, so wait for the calls too.
            while not (generation.groups.is_done and not generation.calls):
                self._assign(generation)
                await generation.changed.wait()
                generation.changed.clear()
                self._raise_failures(generation)
        finally:
            self._generation = None
            for call in generation.calls:
                call.cancel()
            await asyncio.gather(*generation.calls, return_exceptions=True)

    def _assign(self, generation: GenerationState) -> None:
        """Assign requests to the engines that hold the version, as `seating` chooses them."""
        if not generation.groups.num_waiting:
            return
        capacity = int(self.job.config.rollout.max_running_requests * _QUEUED_AHEAD)
        free = [slot for slot in self._fleet.at_work(generation.version) if slot.num_held < capacity]
        demand, num_tokens = generation.demands(), generation.partials.num_tokens
        rooms = [slot.room(demand, capacity=capacity) for slot in free]
        taken = generation.groups.take(sum(room.num_places for room in rooms))
        chosen: defaultdict[int, list[SampleId]] = defaultdict(list)
        for sample, seat in zip(taken, seats(rooms, [demand(each, num_tokens(each)) for each in taken]), strict=True):
            chosen[seat].append(sample)
        for seat, samples in chosen.items():
            slot = free[seat]
            for sample in samples:
                slot.progress.take(sample, num_brought=num_tokens(sample))
            call = asyncio.create_task(self._run_on(slot, samples, generation), name=f"generate {slot.grant.gpu}")
            generation.calls.add(call)
            slot.calls.add(call)
            call.add_done_callback(slot.calls.discard)

    async def _run_on(self, slot: EngineSlot, samples: Sequence[SampleId], generation: GenerationState) -> None:
        remaining = set(samples)
        requests = [generation.to_send(sample) for sample in samples]
        try:
            call = wire.WorkerCall(generate=wire.Generate(requests=requests))
            async for reply in self.crew.stream(slot.grant, call):
                sample = decode_sample_id(reply.generated.sample.id)
                remaining.discard(sample)
                slot.progress.end(sample, len(reply.generated.sample.response_tokens))
                self._take_in(slot, sample, reply.generated.sample, generation)
                generation.changed.set()
        except WorkerGone as error:
            self._note_loss(slot, remaining, generation, error)
            await self.report_unreachable(error)
        finally:
            slot.progress.held.difference_update(remaining)
            generation.groups.give_back(remaining)
            generation.changed.set()

    def _note_loss(
        self, slot: EngineSlot, remaining: Collection[SampleId], generation: GenerationState, error: WorkerGone
    ) -> None:
        """What moved before goes on from where it was handed over last. The rest is generated again."""
        kept = [num for sample in remaining if (num := generation.partials.num_tokens(sample))]
        self._log.warning(
            "engine lost",
            gpu=slot.grant.gpu,
            num_requests=len(remaining),
            num_continued=len(kept),
            num_kept_tokens=sum(kept),
            num_generated_again=len(remaining) - len(kept),
            error=str(error),
        )
        if self._fleet.slots.get(slot.grant.gpu) is slot:
            del self._fleet.slots[slot.grant.gpu]
            generation.note_change()

    def _take_in(
        self, slot: EngineSlot, sample: SampleId, response: samples_pb2.Sample, generation: GenerationState
    ) -> None:
        response.finish = finish_of(
            response, max_new_tokens=generation.max_new_tokens, end_ids=self.job.tokenizer.end_ids
        )
        if response.finish == samples_pb2.FINISH_REASON_ABORT:
            generation.partials.keep(sample, response)
            if slot.is_leaving:
                slot.handed_over.append(sample)
            else:
                generation.groups.give_back([sample])
            return
        generation.partials.end(sample)
        generation.num_tokens += len(response.response_tokens)
        if generation.progress is not None and generation.groups.is_assigned(sample):
            is_cut = response.finish == samples_pb2.FINISH_REASON_LENGTH
            generation.progress.end(sample, len(response.response_tokens), is_cut=is_cut)
        is_new = generation.groups.is_assigned(sample)
        responses = generation.groups.add(sample, response)
        if responses is None and is_new:
            generation.tell(response)
        if responses is not None:
            settling = self._settle(generation, sample.prompt, responses)
            generation.calls.add(asyncio.create_task(settling, name=f"settle {sample.prompt}"))

    async def _settle(self, generation: GenerationState, prompt: int, responses: Sequence[samples_pb2.Sample]) -> None:
        try:
            await generation.settle(generation, prompt, responses)
        finally:
            generation.changed.set()

    async def _publish(
        self,
        plan: types_pb2.IterationPlan,
        exercises: Exercises,
        failures: FailedRewards,
        generation: GenerationState,
        prompt: int,
        responses: Sequence[samples_pb2.Sample],
    ) -> None:
        """Compute the rewards of a complete group, then publish it on the stream."""
        row = exercises.row(prompt)
        if row is not None:
            lengths = [len(response.response_tokens) for response in responses]
            self._mean_tokens[row] = sum(lengths) / len(lengths)
        names = [str(decode_sample_id(response.id)) for response in responses]
        judged = await exercises.judge(prompt, names, [response.response_tokens for response in responses])
        for place, (response, reward) in enumerate(zip(responses, judged.rewards, strict=True)):
            response.reward = reward
            response.rewards.update(judged.by_name[place])
            response.failures.extend(
                samples_pb2.RewardFailure(reward=each.reward, message=each.message, traceback=each.traceback)
                for each in judged.failures.get(place, ())
            )
        group = self._group(plan, prompt, exercises, responses)
        group.grants.extend(encode_grants(self.crew.members))
        is_new = await self.tools.samples.publish(Stage.GENERATED, group)
        # If an earlier lead published the group, its copy counts, with its rewards.
        stored = group if is_new else await self.stored_group(Stage.GENERATED, plan, prompt) or group
        candidates = failures.candidates
        generation.groups.extend(_note_published(stored, candidates))
        figures = {"num_tokens": float(generation.num_tokens)} | generation.partials.figures()
        if num_failed := failures.add(stored):
            figures["num_failed_rewards"] = float(num_failed)
        await self.report_progress("generate", len(candidates.seen), len(candidates.prompts), **figures)
        failures.check()

    def _group(
        self,
        plan: types_pb2.IterationPlan,
        prompt: int,
        exercises: Exercises,
        responses: Sequence[samples_pb2.Sample],
    ) -> samples_pb2.SampleGroup:
        return samples_pb2.SampleGroup(
            job=self.tools.job_id,
            incarnation=self.incarnation,
            iteration=plan.iteration,
            prompt=prompt,
            version=plan.version,
            prompt_tokens=exercises.prompt_tokens(prompt),
            samples=responses,
        )

    async def _failures(self, plan: types_pb2.IterationPlan, candidates: Candidates) -> FailedRewards:
        """The failures of the groups on the stream, which an earlier lead published."""
        failures = FailedRewards(self.job.config.rewards, candidates, group_size=plan.group_size)
        for prompt in sorted(candidates.seen):
            if (group := await self.stored_group(Stage.GENERATED, plan, prompt)) is not None:
                failures.add(group)
        failures.check()
        return failures

    async def _judge(
        self, evaluation: Evaluation, generation: GenerationState, prompt: int, responses: Sequence[samples_pb2.Sample]
    ) -> None:
        await evaluation.take(prompt, responses)
        await self.report_progress(
            "evaluate", evaluation.num_answered, evaluation.num_prompts, num_tokens=float(generation.num_tokens)
        )

    def _request(self, exercises: Exercises, sample: SampleId) -> wire.GenerationRequest:
        return wire.GenerationRequest(
            id=encode_sample_id(sample),
            prompt_tokens=exercises.prompt_tokens(sample.prompt),
            seed=self.job.sampling_seed(sample),
        )

    def _raise_failures(self, generation: GenerationState) -> None:
        for call in [call for call in generation.calls if call.done()]:
            generation.calls.remove(call)
            call.result()

    async def _report(self, plan: types_pb2.IterationPlan) -> None:
        """Report the generated samples, as the stream holds them."""
        published = await self.stored_prompts(Stage.GENERATED, plan)
        ids = [
            SampleId(self.incarnation, plan.iteration, prompt, draw)
            for prompt in sorted(published)
            for draw in range(plan.group_size)
        ]
        await self.publish(events_pb2.IterationReported(generated=fate_of(ids)))


def _note_published(group: samples_pb2.SampleGroup, candidates: Candidates) -> range:
    """Note a published group. Returns the prompts to make now: one more where the group has no spread."""
    known = candidates.prompts
    candidates.add(group.prompt, has_spread=has_spread(rewards_of(group)))
    return range(known.stop, candidates.prompts.stop)
