"""The actor's lead: forms minibatches of complete groups, has them trained, keeps the ledger, publishes the weights.

A resize takes place between two updates, saves or publishes; groups that wait for their minibatch stay held. What a
rank's death breaks off (an update, a save, a publish) waits for the resize that replaces the rank, and is asked of all
ranks again: an update under its id, a save into an empty folder, a publish of the same version. The warm-up is not:
nothing but its steps is lost with an incarnation.
Order around an update: the optimizer's commit on all ranks, the ledger, the journal, the learning rate's ledger, then
events and acknowledgements.
Order at an iteration's end: the report, the scheduler's word that the accounts add up, the checkpoint, the new version:
a checkpoint holds only iterations whose accounts added up. Invariants: a sample enters the lineage once; a group of
another incarnation or iteration is never trained on; what is published is a state between two updates that no later
update changes; a checkpoint or a version is of ranks that all wrote their share of it in one layout.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence

from services.actor.all_ranks import AllRanks
from services.actor.checkpoints import Checkpoint, CheckpointStore
from services.actor.ledger import OpenIteration, SampleLedger, Verdict
from services.actor.lr import LrUpdate, ledger_of, lr_metrics, passed_budget, without_update
from services.actor.membership import ActorWorld
from services.actor.minibatches import MinibatchAssembly
from services.actor.rates import TrainingRates
from services.actor.resizing import Resize, ResizeAborted, Resizing, resize_of
from services.actor.sample_log import Fate, SampleLog, fate_of_update
from services.actor.showing import Showing
from services.actor.snapshots import SnapshotShelf
from services.actor.training import IterationTraining, iteration_report, journal_row, told_update, train_samples
from tidegate.candidates import has_spread
from tidegate.checksums import WrittenFile
from tidegate.codec import decode_grants, decode_sample_id, encode_grants, encode_layout
from tidegate.lines import append_lines
from tidegate.lr.errors import TooManySkips
from tidegate.lr.progress import LrLedger
from tidegate.ports.bus import SampleDelivery, Stage
from tidegate.runtime.cancelling import end_task
from tidegate.runtime.lead import Lead, LeadTools, candidates_of, layout_of, put_off_s, rewards_of
from tidegate.runtime.pictures import Pictures
from tidegate.types import Grant, Role, SampleId
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

_FETCH_TIMEOUT_S = 5.0
_KEEP_ALIVES_PER_ACK_WAIT = 3
ZERO_STD = "zero_std"
NONFINITE_UPDATE = "nonfinite_update"


class UpdatesSkipped(ArithmeticError):
    """Too many updates in a row had a gradient that was not finite."""


class ActorLead(Lead):
    """See the module."""

    can_change = True
    can_migrate = True

    def __init__(self, tools: LeadTools) -> None:
        super().__init__(tools)
        config = self.job.config
        self._world = ActorWorld(
            self.crew,
            (*config.placement(Role.ACTOR), *config.standby()),
            config_json=config.to_json(),
            timeout_s=config.runtime.collective_timeout_s,
            standby_bytes=config.actor.standby_memory_mib << 20,
        )
        self._resizing = Resizing(tools, self._world)
        self._resizes: set[asyncio.Task[None]] = set()
        """One at work; one whose transition was closed meanwhile may wait for the ranks before it."""
        self._ranks = AllRanks(self.crew)
        self._checkpoints = CheckpointStore(tools.folder.checkpoints, keep=self.job.config.checkpoint.keep)
        self._shelf = SnapshotShelf(tools)
        per_iteration = self.job.config.samples.per_iteration
        self._samples = SampleLog(tools.folder.samples, self.job.tokenizer, per_iteration=per_iteration)
        self._ledger = SampleLedger(incarnation=0)
        self._lr = ledger_of(config, None)
        self._rates = TrainingRates(config.assumptions.costs.update_s)

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

    def _begin_resize(self, resize: Resize) -> None:
        """Other commands are taken meanwhile: an update may take long, and the component's end shall not wait."""
        task = asyncio.create_task(self._resize(resize), name=f"resize {resize.transition}")
        self._resizes.add(task)
        task.add_done_callback(self._resizes.discard)

    async def _end_resizes(self) -> None:
        for task in list(self._resizes):
            await end_task(task)

    async def _resize(self, resize: Resize) -> None:
        try:
            async with self._ranks.alone():
                report, released = await self._resizing.run(resize, self._ranks.layout)
                self._ranks.switch(resize.layout)
        except ResizeAborted as aborted:
            await self.tell(events_pb2.ResizeFailed(message=str(aborted)), transition=resize.transition)
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the ranks hold no state that goes on
            await self.fail(f"resize {resize.transition}", error)
            return
        else:
            await self._tell_resized(resize, report, released)
        # A process more is of the world for the next resize, and for none that is at work.
        async with self._ranks.alone():
            await self._world.stand_by()

    async def _tell_resized(self, resize: Resize, report: types_pb2.ReshardReport, released: Sequence[Grant]) -> None:
        transition = resize.transition
        if resize.coming:
            acquired = events_pb2.GpusAcquired(grants=encode_grants(resize.coming))
            await self.tell(acquired, transition=transition, grants=resize.coming)
        committed = events_pb2.LayoutCommitted(
            layout=encode_layout(resize.layout), grants=encode_grants(resize.members), reshard=report
        )
        await self.tell(committed, transition=transition, grants=resize.members)
        if released:
            gone = events_pb2.GpusReleased(grants=encode_grants(released))
            await self.tell(gone, transition=transition, grants=released)

    async def _start(self, request: commands_pb2.ScaleUpRequest) -> None:
        checkpoint = None
        if request.checkpoint:
            checkpoint = await asyncio.to_thread(self._checkpoints.load, request.checkpoint)
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
            checkpoint_dir=str(self._checkpoints.path(request.checkpoint)) if checkpoint else "",
            ranks=self._world.ids(members),
        )
        # Those that stand by too: all of a world learn where the state is.
        await self.crew.ask_all(dict.fromkeys(self._world.everyone, wire.WorkerCall(start_actor=start)))
        self._resizing.began()
        if self.crew.standbys:
            num_standbys, num_slots = len(self.crew.standbys), len(self.job.config.standby())
            await self.tell_progress("stand_by", num_standbys, num_slots, memory_bytes_max=standby_bytes)
        self._ledger = checkpoint.ledger.resumed(self.incarnation) if checkpoint else SampleLedger(self.incarnation)
        next_iteration = checkpoint.next_iteration if checkpoint else 0
        await self.announce_layout(request, next_iteration=next_iteration, next_prompt=self._ledger.next_prompt)
        await self.begin("first version", self._publish_first(checkpoint))

    async def _publish_first(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            async with self._ranks.alone():
                await self._warm_up()
        else:
            # A job that was stopped while it exported has its last checkpoint and no export.
            await self._export_last(checkpoint)
        await self._publish(checkpoint.version if checkpoint else 0)

    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        raise ValueError("the actor makes the weights and loads none")

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
        training = IterationTraining(plan, assembly, Showing(assembly, self._rates))
        pictures = Pictures(training.showing.paint, self.tell, self.pace)
        training.showing.turn = pictures.turn
        keeping = asyncio.create_task(self._keep_alive(training), name="keep-alive")
        try:
            async with pictures.told():
                await self._train_all(training)
        finally:
            keeping.cancel()
        num_never_filled = plan.num_minibatches - training.num_minibatches_taken
        self._follow(without_update(self._lr, num_minibatches=num_never_filled))
        self._ledger = self._ledger.taking(len(candidates.prompts))
        fates = self._ledger.open_iteration
        assert fates is not None, "the iteration is open until it is closed"
        await self._samples.written()
        await self.tell(iteration_report(training, fates, lr_metrics(self._lr)))

    async def close_iteration(self, request: commands_pb2.CloseIterationRequest) -> None:
        open_iteration = self._ledger.open_iteration
        if open_iteration is None or open_iteration.iteration != request.iteration:
            return
        self._ledger = self._ledger.closed_now()
        # Further commands are taken meanwhile: a resize, should a rank die.
        closing = self._end_of(request.iteration, next_version=open_iteration.version + 1)
        await self.begin(f"end of iteration {request.iteration}", closing)

    async def _end_of(self, iteration: int, *, next_version: int) -> None:
        await self._save(next_iteration=iteration + 1, version=next_version)
        await self._publish(next_version)
        await self.crew.drop_snapshots(before_version=next_version, keep=self.versions_to_keep)

    async def _warm_up(self) -> None:
        asked = self.job.config.actor.warm_up
        if asked.steps == 0:
            return
        call = wire.WorkerCall(
            warm_up=wire.WarmUp(num_steps=asked.steps, batch_size=asked.batch_size, learning_rate=asked.learning_rate)
        )
        first, *others = self.crew.members
        rest = [asyncio.ensure_future(self.crew.ask(grant, call)) for grant in others]
        try:
            async for reply in self.crew.stream(first, call):
                at = reply.warm_up
                if at.step % max(1, asked.steps // 20) == 0 or at.step == asked.steps:
                    await self.tell_progress("warm_up", at.step, at.num_steps, loss=at.loss)
            await asyncio.gather(*rest)
        finally:
            for task in rest:
                task.cancel()

    async def _train_all(self, training: IterationTraining) -> None:
        consumer = await self.tools.samples.consumer(
            self.tools.job_id, Stage.SCORED, "actor", on_dead_letter=self.tools.announcer.tell_dead_letter
        )
        while not training.assembly.is_done:
            for delivery in await consumer.fetch(training.plan.num_prompts, timeout_s=_FETCH_TIMEOUT_S):
                await self._take_in(delivery, training)
            while (prompts := training.assembly.take()) is not None:
                await self._train(prompts, training)

    async def _take_in(self, delivery: SampleDelivery, training: IterationTraining) -> None:
        group = delivery.group
        ids = [decode_sample_id(sample.id) for sample in group.samples]
        if (group.incarnation, group.iteration) > (self.incarnation, training.plan.iteration):
            await delivery.nak(delay_s=put_off_s(delivery.num_deliveries))
            return
        match self._ledger.verdict(ids):
            case Verdict.NEW if group.prompt in training.held:
                # It was kept alive too late. Its update is still to come: until then a crash must bring it again.
                training.num_duplicates_dropped += len(ids)
                training.held[group.prompt] = delivery
            case Verdict.NEW if len(ids) == training.plan.group_size and group.version == training.plan.version:
                training.held[group.prompt] = delivery
                training.assembly.add(group.prompt, has_spread=has_spread(rewards_of(group)))
            case Verdict.SEEN:
                training.num_duplicates_dropped += len(ids)
                await delivery.ack()
            case Verdict.SUPERSEDED:
                await delivery.ack()
            case _:
                possible = training.assembly.candidates.possible
                await delivery.dead_letter(
                    f"group of prompt {group.prompt} holds {len(ids)} samples of iteration {group.iteration}, version "
                    f"{group.version}; iteration {training.plan.iteration} takes prompts {possible[0]}-{possible[-1]} "
                    f"in groups of {training.plan.group_size} from version {training.plan.version}"
                )

    async def _train(self, prompts: Sequence[int], training: IterationTraining) -> None:
        """One minibatch: what is filtered, the optimizer update, and what follows from its commit."""
        training.num_minibatches_taken += 1
        deliveries = [training.held[prompt] for prompt in prompts]
        groups = [delivery.group for delivery in deliveries]
        for group in groups:
            training.rewards.extend(rewards_of(group))
            training.lengths.extend(len(sample.response_tokens) for sample in group.samples)
        kept = groups
        if self.job.config.algorithm.filter_zero_std:
            kept = [group for group in groups if has_spread(rewards_of(group))]
            left_out = [group for group in groups if not has_spread(rewards_of(group))]
            filtered = [sample for group in left_out for sample in group.samples]
            self._ledger = self._ledger.filtered(_ids(filtered), reason=ZERO_STD)
            self._samples.note(training.plan, left_out, Fate("filtered", ZERO_STD))
        if kept:
            await self._update(kept, training)
        elif training.num_minibatches_taken <= training.plan.num_minibatches:
            self._follow(without_update(self._lr, num_minibatches=1))
        training.showing.end_minibatch()
        await asyncio.gather(*(delivery.ack() for delivery in deliveries))
        for prompt in prompts:
            del training.held[prompt]

    async def _update(self, groups: Sequence[samples_pb2.SampleGroup], training: IterationTraining) -> None:
        config, plan = self.job.config, training.plan
        update_id = f"{self.incarnation}.{plan.iteration}.{training.num_minibatches_taken - 1}"
        samples = [sample for group in groups for sample in train_samples(group, config.algorithm)]
        lr = LrUpdate(self._lr, update_id, len(samples))
        train = wire.Train(update_id=update_id, samples=samples, learning_rate=lr.rate)
        train.lr_before, train.lr_after = lr.before.mark, lr.committed.mark
        num_tokens = sum(len(sample.response_tokens) for sample in samples)

        async def updated() -> list[wire.WorkerReply]:
            with training.showing.updating(self._ranks.layout, num_tokens):
                return await self._ranks.ask(wire.WorkerCall(train=train))

        replies = await self._ranks.do(f"update {update_id}", updated)
        reports = [reply.update for reply in replies]
        lr.check(reports)
        report = told_update(reports)
        ids = _ids([sample for group in groups for sample in group.samples])
        if report.committed:
            self._ledger = self._ledger.committed(update_id, ids)
        else:
            self._ledger = self._ledger.discarded(ids, reason=NONFINITE_UPDATE)
        row = journal_row(update_id, ids, report, lr.rate)
        append_lines(self.tools.folder.journal, (json.dumps(row, allow_nan=False) + "\n").encode())
        self._samples.note(plan, groups, fate_of_update(report, samples, reason=NONFINITE_UPDATE))
        self._follow(self._after(lr, is_committed=report.committed))
        figures = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": lr.rate, **lr_metrics(self._lr)}
        metrics = {**report.metrics, **figures}
        training.updates.append(metrics)
        await self.tell_progress("train", training.num_minibatches_taken, plan.num_minibatches, **metrics)

    def _follow(self, after: LrLedger) -> None:
        """The learning rate is as far as this."""
        if beyond := passed_budget(self._lr, after):
            self._log.warning("learning rate", message=beyond)
        self._lr = after

    def _after(self, lr: LrUpdate, *, is_committed: bool) -> LrLedger:
        """The ledger once the update has ended; UpdatesSkipped."""
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

        async def written() -> Checkpoint:
            folder = await asyncio.to_thread(self._checkpoints.begin)
            replies = await self._ranks.ask(wire.WorkerCall(save=wire.Save(folder=str(folder))))
            saved = [reply.saved for reply in replies if reply.saved.file]
            files = tuple(WrittenFile(each.file, each.size_bytes, each.checksum) for each in saved)
            return Checkpoint(next_iteration, version, self._ranks.layout, self._ledger, files, self._lr)

        checkpoint = await self._ranks.do(f"checkpoint {next_iteration}", written)
        await asyncio.to_thread(self._checkpoints.commit, checkpoint)
        # Before the save is told: a job whose actor dies meanwhile comes here again.
        await self._export_last(checkpoint)
        await self.tell(
            events_pb2.CheckpointSaved(
                next_iteration=next_iteration,
                version=version,
                name=checkpoint.name,
                num_samples_trained=self._ledger.num_trained,
            )
        )
        # Only now: until it is told, a resume takes the one before.
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

        async def written() -> types_pb2.Snapshot:
            if next(tries):
                # What lies there may be of ranks in another layout.
                await self.crew.drop_snapshots(before_version=version + 1, keep=(*self.versions_to_keep, version - 1))
            return await self._shelf.publish(version, incarnation=self.incarnation)

        snapshot = await self._ranks.do(f"version {version}", written)
        reference = await self._shelf.reference(snapshot)
        await self.tell(events_pb2.WeightsPublished(snapshot=snapshot, reference=reference))

    async def _keep_alive(self, training: IterationTraining) -> None:
        """Groups held for their minibatch are not delivered again meanwhile."""
        while True:
            await asyncio.sleep(self.job.config.runtime.ack_wait_s / _KEEP_ALIVES_PER_ACK_WAIT)
            held = list(training.held.values())
            # One that is not told in time is delivered again, and then dropped as seen.
            await asyncio.gather(*(delivery.in_progress() for delivery in held), return_exceptions=True)


def _ids(samples: Sequence[samples_pb2.Sample]) -> list[SampleId]:
    return [decode_sample_id(sample.id) for sample in samples]
