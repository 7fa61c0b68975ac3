"""The actor's lead: forms minibatches of complete groups, requests updates, keeps the ledger, publishes the weights.

A resize, a suspension or a resumption takes place between two portions, updates, saves or publishes. Groups that wait
for their update stay held meanwhile. A rank's death interrupts a portion, an update, a save or a publish. The lead
waits for the resize that replaces the rank. It then repeats the request to all ranks: an update under its id, a save
into an empty folder, a publish of the same version. It does not repeat the warm-up: a new incarnation loses only the
warm-up's steps.

An update takes these steps:
1. All ranks add up the gradients of the minibatch's portions, as its groups come (`portions`). A resize between two
   portions carries these gradients into its layout. A death or a suspension drops them, and so does a resize that fails
   or is in reproducible mode: their tokens are counted, and the minibatch begins again.
2. With the last portion, all ranks commit the optimizer's update.
3. The sample ledger, the journal and the learning-rate ledger record it, in this order.
4. The lead publishes the events and acknowledges the groups.

The end of an iteration takes these steps:
1. The lead publishes its report.
2. The scheduler confirms that the accounts add up. A checkpoint thus holds only iterations whose accounts add up.
3. The lead saves the checkpoint.
4. The lead publishes the new version.

Invariants:
- A sample enters the lineage once. [test_lead_samples: after_its_update_is_dropped]
- No group is acknowledged before its update. [test_streaming: nothing_is_acknowledged_between_portions]
- A held lead begins no minibatch. [test_streaming: held_lead_begins_no_minibatch]
- A group of another incarnation is never trained. [test_lead_samples: older_incarnation_is_acknowledged_untrained]
- A group of another iteration is never trained. [test_lead_samples: future_incarnation_or_iteration]
- A published version is a state between two updates, and no later update changes it.
  [test_snapshots: published_version_is_not_changed]
- All ranks of one layout wrote their shards of a checkpoint or a version.
  [test_two_phase_resize: is_done_again_by_all_ranks]
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from services.actor.all_ranks import AllRanks
from services.actor.checkpoints import Checkpoint, CheckpointStore
from services.actor.iteration_state import IterationState, iteration_report, journal_row
from services.actor.layouts_ahead import LayoutsAhead
from services.actor.ledger import OpenIteration, SampleLedger, Verdict
from services.actor.lr import LrUpdate, ledger_of, lr_metrics, passed_budget, without_update
from services.actor.membership import ActorWorld
from services.actor.minibatches import MinibatchAssembly
from services.actor.portions import Portion
from services.actor.rates import TrainingRates
from services.actor.sample_log import Fate, SampleLog, fate_of_update
from services.actor.snapshots import SnapshotShelf
from services.actor.streamed_updates import StreamedUpdates
from services.actor.suspension import Suspension
from services.actor.training_picture import TrainingPicture
from services.actor.two_phase_resize import Resize, ResizeAborted, Resized, TwoPhaseResize, resize_of
from tidegate.checksums import WrittenFile
from tidegate.codec import decode_grants, decode_sample_id, encode_grants, encode_layout
from tidegate.lines import append_lines
from tidegate.lr.errors import TooManySkips
from tidegate.lr.progress import LrLedger
from tidegate.ports.bus import SampleDelivery, Stage
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.keep_alive import keep_alive
from tidegate.runtime.lead import Lead, LeadTools, candidates_of, layout_of, redelivery_delay_s
from tidegate.runtime.pictures import Pictures
from tidegate.types import Role, SampleId
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

_FETCH_TIMEOUT_S = 5.0
ZERO_STD = "zero_std"
NONFINITE_UPDATE = "nonfinite_update"


class UpdatesSkipped(ArithmeticError):
    """Too many updates in a row had a non-finite gradient."""


class ActorLead(Lead):
    can_migrate = True
    can_hold = True
    can_suspend = True

    def __init__(self, tools: LeadTools) -> None:
        super().__init__(tools)
        config = self.job.config
        self._world = ActorWorld(
            self.crew,
            config.slots(Role.ACTOR),
            config_json=config.to_json(),
            timeout_s=config.runtime.collective_timeout_s,
            standby_bytes=config.actor.standby_memory_mib << 20,
        )
        self._two_phase = TwoPhaseResize(tools, self._world)
        self._changes: set[asyncio.Task[None]] = set()
        """One resize at work. Besides it, one whose transition was closed meanwhile may still wait for the ranks."""
        self._ranks = AllRanks(self.crew)
        self._suspension = Suspension(self.crew, self._world, self._two_phase, self._ranks, self)
        self._ahead = LayoutsAhead(
            self.job, self.crew, self._world, self._ranks, is_resting=lambda: self._suspension.is_resting
        )
        self._checkpoints = CheckpointStore(tools.folder.checkpoints, keep=self.job.config.checkpoint.keep)
        self._shelf = SnapshotShelf(tools)
        per_iteration = self.job.config.samples.per_iteration
        self._samples = SampleLog(tools.folder.samples, self.job.tokenizer, per_iteration=per_iteration)
        self._ledger = SampleLedger(incarnation=0)
        self._lr = ledger_of(config, None)
        self.rates = TrainingRates(config.assumptions.costs.update_s)
        self._updates = StreamedUpdates(self._ranks, self.job)
        self._state: IterationState | None = None
        """The open iteration's. None between two."""
        self._held_iteration: tuple[int, int] | None = None
        """The (incarnation, iteration) of which no further minibatch begins."""
        self._note_change: Callable[[], None] = lambda: None
        self._ranks.note_interruption = lambda: self._note_change()

    async def aclose(self) -> None:
        await self._end_resizes()
        await super().aclose()
        self._samples.close()

    async def supersede(self) -> None:
        await self._end_resizes()

    async def scale_up(self, request: commands_pb2.ScaleUpRequest) -> None:
        resize = resize_of(request)
        if resize is not None:
            self._begin_resize(resize)
        else:
            await self._start(request)

    async def scale_down(self, request: commands_pb2.ScaleDownRequest) -> None:
        resize = resize_of(request)
        if resize is not None:
            self._begin_resize(resize)
            return
        await self._end_resizes()
        await super().scale_down(request)

    async def migrate(self, request: commands_pb2.MigrateRequest) -> None:
        resize = resize_of(request)
        assert resize is not None, "a Migrate of an actor is a resize"
        self._begin_resize(resize)

    async def suspend(self, request: commands_pb2.SuspendRequest) -> None:
        self._begin_change(f"suspension {request.header.transition_id}", self._suspension.suspend(request))

    async def resume(self, request: commands_pb2.ResumeRequest) -> None:
        self._begin_change(f"resumption {request.header.transition_id}", self._suspension.resume(request))

    def _begin_resize(self, resize: Resize) -> None:
        self._begin_change(f"resize {resize.transition}", self._resize(resize))

    def _begin_change(self, what: str, change: Coroutine[Any, Any, None]) -> None:
        """Run the change in the background. An update may take long, and a command to stop must not wait for it."""
        task = asyncio.create_task(change, name=what)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _end_resizes(self) -> None:
        for task in list(self._changes):
            await end_task(task)

    async def _resize(self, resize: Resize) -> None:
        try:
            carries = self.job.config.actor.carries_gradients
            async with self._ranks.alone(to=resize.layout, carries=carries) as change:
                num_dead = self._ranks.layout.num_ranks - len(resize.survivors)
                portions = () if num_dead or self._state is None else self._updates.portions(self._state.begun)
                resized = await self._two_phase.run(resize, self._ranks.layout, portions=portions)
                self._ranks.switch(resize.layout)
                change.interrupts = not resized.keeps_portions
        except ResizeAborted as aborted:
            await self.publish(events_pb2.ResizeFailed(message=str(aborted)), transition=resize.transition)
        except Exception as error:  # noqa: BLE001 - the edge: after any error the ranks hold no usable state
            await self.fail(f"resize {resize.transition}", error)
            return
        else:
            await self._report_resize(resize, resized, num_dead=num_dead)
        # A new standby joins the world of the next resize, so start it while no resize is at work.
        async with self._ranks.alone(changes_ranks=False):
            await self._world.stand_by()

    async def _report_resize(self, resize: Resize, resized: Resized, *, num_dead: int) -> None:
        transition, released = resize.transition, resized.released
        if resize.coming:
            acquired = events_pb2.GpusAcquired(grants=encode_grants(resize.coming))
            await self.publish(acquired, transition=transition, grants=resize.coming)
        committed = events_pb2.LayoutCommitted(
            layout=encode_layout(resize.layout),
            grants=encode_grants(resize.members),
            reshard=resized.report,
            num_dead=num_dead,
        )
        await self.publish(committed, transition=transition, grants=resize.members)
        if released:
            message = events_pb2.GpusReleased(grants=encode_grants(released))
            await self.publish(message, transition=transition, grants=released)

    async def _start(self, request: commands_pb2.ScaleUpRequest) -> None:
        checkpoint = None
        if request.checkpoint:
            checkpoint, faults = await asyncio.to_thread(self._checkpoints.load_newest, request.checkpoint)
            for fault in faults:
                self._log.error("checkpoint passed over", goes_on_from=checkpoint.name, fault=fault)
        self._lr = ledger_of(self.job.config, checkpoint)
        members = decode_grants(request.members)
        await self._world.begin(self.incarnation)
        await self._world.start(members, transition=request.header.transition_id)
        await self._world.stand_by()
        standby_bytes = await self._world.join()
        self._ranks.switch(layout_of(request))
        start = wire.StartActor(
            layout=encode_layout(self._ranks.layout),
            config_json=request.config_json,
            checkpoint_dir=str(self._checkpoints.path(checkpoint.name)) if checkpoint else "",
            ranks=self._world.ids(members),
        )
        # Standbys get the call too: all members of a world learn where the state is.
        await self.crew.ask_all(dict.fromkeys(self._world.everyone, wire.WorkerCall(start_actor=start)))
        self._two_phase.note_start()
        self._suspension.note_start()
        if self.crew.standbys:
            num_standbys = len(self.crew.standbys)
            num_slots = len(self.job.config.slots(Role.ACTOR)) - len(members)
            await self.report_progress("stand_by", num_standbys, num_slots, memory_bytes_max=standby_bytes)
        self._ledger = checkpoint.ledger.resumed(self.incarnation) if checkpoint else SampleLedger(self.incarnation)
        next_iteration = checkpoint.next_iteration if checkpoint else 0
        await self.announce_layout(request, next_iteration=next_iteration, next_prompt=self._ledger.next_prompt)
        await self.begin("first version", self._publish_first(checkpoint))

    async def _publish_first(self, checkpoint: Checkpoint | None) -> None:
        await self._ahead.before_first_version()
        if checkpoint is None:
            async with self._ranks.alone():
                await self._warm_up()
        else:
            # A job that was stopped during its export has its last checkpoint, but no export.
            await self._export_last(checkpoint)
        await self._publish(checkpoint.version if checkpoint else 0)

    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        raise ValueError("the actor makes the weights; it cannot load any")

    def hold_training(self, request: commands_pb2.HoldTrainingRequest) -> None:
        place = request.header.incarnation, request.iteration
        if request.holds:
            self._held_iteration = place
        elif self._held_iteration == place:
            self._held_iteration = None
        self._note_change()

    async def run_iteration(self, plan: types_pb2.IterationPlan) -> None:
        self._ledger = self._ledger.opened(
            OpenIteration(
                iteration=plan.iteration,
                first_prompt=plan.first_prompt,
                num_prompts=plan.num_prompts,
                group_size=plan.group_size,
                version=plan.version,
                max_extra_prompts=plan.max_extra_prompts,
            )
        )
        candidates = candidates_of(plan)
        order = self.job.config.algorithm.minibatch_order
        assembly = MinibatchAssembly(candidates, plan.num_minibatches, order)
        state = IterationState(plan, assembly, TrainingPicture(assembly, self.rates))
        pictures = Pictures(state.picture.paint, self.publish, self.pace)
        state.picture.note_change = pictures.note_change
        keeping = asyncio.create_task(
            keep_alive(state.held.values, ack_wait_s=self.job.config.runtime.ack_wait_s), name="keep-alive"
        )
        # By now all components have loaded this version. While they loaded it, an engine or copy that came still read
        # the one before.
        drop = self.crew.drop_snapshots(before_version=plan.version, keep=self.versions_to_keep)
        dropping = asyncio.create_task(drop, name="drop-snapshots")
        self._state = state
        try:
            async with pictures.updates():
                await self._train_all(state)
        finally:
            self._state = None
            self._ranks.end_reservation()
            keeping.cancel()
            dropping.cancel()
        num_never_filled = plan.num_minibatches - state.num_minibatches_taken
        self._advance_lr(without_update(self._lr, num_minibatches=num_never_filled))
        self._ledger = self._ledger.taking(len(candidates.prompts))
        fates = self._ledger.open_iteration
        assert fates is not None, "the iteration stays open until close_iteration"
        await self._samples.written()
        await self.publish(iteration_report(state, fates, lr_metrics(self._lr)))

    async def close_iteration(self, request: commands_pb2.CloseIterationRequest) -> None:
        open_iteration = self._ledger.open_iteration
        if open_iteration is None or open_iteration.iteration != request.iteration:
            return
        self._ledger = self._ledger.closed_now()
        # Run this in the background: if a rank dies, the lead must accept the resize that replaces it.
        end = self._end_of(request.iteration, next_version=open_iteration.version + 1)
        await self.begin(f"end of iteration {request.iteration}", end)

    async def _end_of(self, iteration: int, *, next_version: int) -> None:
        await self._save(next_iteration=iteration + 1, version=next_version)
        await self._publish(next_version)

    async def _warm_up(self) -> None:
        warm_up = self.job.config.actor.warm_up
        if warm_up.steps == 0:
            return
        call = wire.WorkerCall(
            warm_up=wire.WarmUp(
                num_steps=warm_up.steps, batch_size=warm_up.batch_size, learning_rate=warm_up.learning_rate
            )
        )
        first, *others = self.crew.members
        rest = [asyncio.ensure_future(self.crew.ask(grant, call)) for grant in others]
        try:
            async for reply in self.crew.stream(first, call):
                done = reply.warm_up
                if done.step % max(1, warm_up.steps // 20) == 0 or done.step == warm_up.steps:
                    await self.report_progress("warm_up", done.step, done.num_steps, loss=done.loss)
            await asyncio.gather(*rest)
        finally:
            for task in rest:
                task.cancel()

    async def _train_all(self, state: IterationState) -> None:
        intake = asyncio.create_task(self._take_in_all(state), name="intake")
        self._note_change = state.changed.set
        try:
            while not state.assembly.is_done:
                is_held = self._held_iteration == (self.incarnation, state.plan.iteration)
                if (portion := self._updates.next_portion(state, is_held=is_held)) is None:
                    is_begun = bool(state.begun.num_portions)
                    await self._ahead.meanwhile(state.until_changed(intake), may_build=not is_begun)
                else:
                    await self._train(portion, state)
        finally:
            await end_task(intake)

    async def _take_in_all(self, state: IterationState) -> None:
        """Take in groups, also while others are trained, until all have come."""
        consumer = await self.tools.samples.consumer(
            self.tools.job_id, Stage.SCORED, "actor", on_dead_letter=self.tools.announcer.publish_dead_letter
        )
        while not state.assembly.candidates.is_complete:
            for delivery in await consumer.fetch(state.plan.num_prompts, timeout_s=_FETCH_TIMEOUT_S):
                await self._take_in(delivery, state)
            state.changed.set()

    async def _take_in(self, delivery: SampleDelivery, state: IterationState) -> None:
        group = delivery.group
        ids = [decode_sample_id(sample.id) for sample in group.samples]
        if (group.incarnation, group.iteration) > (self.incarnation, state.plan.iteration):
            await delivery.nak(delay_s=redelivery_delay_s(delivery.num_deliveries))
            return
        match self._ledger.verdict(ids):
            case Verdict.NEW if group.prompt in state.held:
                # Its in-progress ack came too late. Its update is still to come, so do not ack it: after a crash it
                # must be delivered again.
                state.num_duplicates_dropped += len(ids)
                state.held[group.prompt] = delivery
            case Verdict.NEW if len(ids) == state.plan.group_size and group.version == state.plan.version:
                state.hold(delivery, filters=self.job.config.algorithm.filter_zero_std)
            case Verdict.SEEN:
                state.num_duplicates_dropped += len(ids)
                await delivery.ack()
            case Verdict.SUPERSEDED:
                await delivery.ack()
            case _:
                possible = state.assembly.candidates.possible
                await delivery.dead_letter(
                    f"group of prompt {group.prompt} holds {len(ids)} samples of iteration {group.iteration}, version "
                    f"{group.version}; iteration {state.plan.iteration} takes prompts {possible[0]}-{possible[-1]} "
                    f"in groups of {state.plan.group_size} from version {state.plan.version}"
                )

    async def _train(self, portion: Portion, state: IterationState) -> None:
        """Train a portion. With the last one, make the update, record the fates, acknowledge."""
        state.assembly.join(portion.prompts)
        update_id = f"{self.incarnation}.{state.plan.iteration}.{state.num_minibatches_taken}"
        if not portion.is_last:
            await self._updates.accumulate(portion, state, update_id=update_id, lr_before=self._lr.mark)
            return
        prompts = state.assembly.open
        kept = state.trained_groups(prompts)
        lr = LrUpdate(self._lr, update_id, sum(len(group.samples) for group in kept))
        report = await self._updates.update(portion, state, lr) if kept else None
        if kept and report is None:
            return
        state.num_minibatches_taken += 1
        groups = [state.held[prompt].group for prompt in prompts]
        state.note_groups(groups)
        if without_spread := [group for group in groups if group.prompt not in state.trained_lengths]:
            filtered = [sample for group in without_spread for sample in group.samples]
            self._ledger = self._ledger.filtered(_ids(filtered), reason=ZERO_STD)
            self._samples.note(state.plan, without_spread, Fate("filtered", ZERO_STD))
        if report is not None:
            await self._record(lr, report, kept, state)
        elif state.num_minibatches_taken <= state.plan.num_minibatches:
            self._advance_lr(without_update(self._lr, num_minibatches=1))
        state.assembly.close()
        state.picture.end_minibatch()
        deliveries = state.let_go(prompts)
        await asyncio.gather(*(delivery.ack() for delivery in deliveries))

    async def _record(
        self, lr: LrUpdate, report: wire.UpdateReport, groups: Sequence[samples_pb2.SampleGroup], state: IterationState
    ) -> None:
        ids = _ids([sample for group in groups for sample in group.samples])
        if report.committed:
            self._ledger = self._ledger.committed(lr.update_id, ids)
        else:
            self._ledger = self._ledger.discarded(ids, reason=NONFINITE_UPDATE)
        dropped, state.num_dropped_tokens = state.num_dropped_tokens, 0
        row = journal_row(lr.update_id, ids, report, lr.rate, num_dropped_tokens=dropped)
        append_lines(self.tools.folder.journal, (json.dumps(row, allow_nan=False) + "\n").encode())
        samples = self._updates.samples_of(groups)
        self._samples.note(state.plan, groups, fate_of_update(report, samples, reason=NONFINITE_UPDATE))
        self._advance_lr(self._lr_after(lr, is_committed=report.committed))
        figures = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": lr.rate, **lr_metrics(self._lr)}
        metrics = {**report.metrics, **figures, "dropped_tokens": float(dropped)}
        state.updates.append(metrics)
        await self.report_progress("train", state.num_minibatches_taken, state.plan.num_minibatches, **metrics)

    def _advance_lr(self, after: LrLedger) -> None:
        if warning := passed_budget(self._lr, after):
            self._log.warning("learning rate", message=warning)
        self._lr = after

    def _lr_after(self, lr: LrUpdate, *, is_committed: bool) -> LrLedger:
        """The learning-rate ledger after the update. Raises UpdatesSkipped."""
        if is_committed:
            return lr.committed
        try:
            return lr.skipped
        except TooManySkips as error:
            allowed = self.job.config.actor.max_skipped_updates
            raise UpdatesSkipped(
                f"{allowed + 1} updates in a row had a non-finite gradient (actor.max_skipped_updates={allowed}), the "
                f"last {lr.update_id}; lower actor.learning_rate, or resume from an earlier checkpoint"
            ) from error

    async def _save(self, *, next_iteration: int, version: int) -> None:
        config = self.job.config
        due = next_iteration % config.checkpoint.every == 0 or next_iteration == config.algorithm.iterations
        if not due:
            return

        async def write_files() -> Checkpoint:
            folder = await asyncio.to_thread(self._checkpoints.begin)
            replies = await self._ranks.ask(wire.WorkerCall(save=wire.Save(folder=str(folder))))
            saved = [reply.saved for reply in replies if reply.saved.file]
            files = tuple(WrittenFile(each.file, each.size_bytes, each.checksum) for each in saved)
            return Checkpoint(next_iteration, version, self._ranks.layout, self._ledger, files, self._lr)

        checkpoint = await self._ranks.do(f"checkpoint {next_iteration}", write_files)
        await asyncio.to_thread(self._checkpoints.commit, checkpoint)
        # Export before announcing the save: if the actor dies meanwhile, the resume exports again.
        await self._export_last(checkpoint)
        await self.publish(
            events_pb2.CheckpointSaved(
                next_iteration=next_iteration,
                version=version,
                name=checkpoint.name,
                num_samples_trained=self._ledger.num_trained,
            )
        )
        # Prune only now: until the save is announced, a resume takes the checkpoint before.
        await asyncio.to_thread(self._checkpoints.prune)
        await self.tools.samples.purge(self.tools.job_id, incarnation=self.incarnation, iteration=next_iteration)

    async def _export_last(self, checkpoint: Checkpoint) -> None:
        config = self.job.config
        if not config.checkpoint.export or checkpoint.next_iteration < config.algorithm.iterations:
            return
        folder = self._checkpoints.path(checkpoint.name)
        export = wire.Export(checkpoint_dir=str(folder), folder=str(self.tools.folder.export))
        call = wire.WorkerCall(export=export)
        await self._ranks.do("export", lambda: self.crew.ask(self.crew.members[0], call))

    async def _publish(self, version: int) -> None:
        tries = itertools.count()

        async def write_shards() -> types_pb2.Snapshot:
            if next(tries):
                # Avoid a mix of layouts: ranks of the former layout may have left files here.
                await self.crew.drop_snapshots(before_version=version + 1, keep=(*self.versions_to_keep, version - 1))
            return await self._shelf.publish(version, incarnation=self.incarnation)

        snapshot = await self._ranks.do(f"version {version}", write_shards)
        reference = await self._shelf.reference(snapshot)
        await self.publish(events_pb2.WeightsPublished(snapshot=snapshot, reference=reference))


def _ids(samples: Sequence[samples_pb2.Sample]) -> list[SampleId]:
    return [decode_sample_id(sample.id) for sample in samples]
