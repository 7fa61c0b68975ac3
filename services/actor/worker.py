"""An actor worker: one member of the actor's world, driven by its instance's calls.

The calls come in this order:
1. All workers, standbys included, get JoinWorld.
2. All workers get StartActor.
3. The ranks of the layout get updates, publishes and saves. All workers get reshards, also between two portions:
   PrepareReshard, then CommitReshard or AbortReshard. A suspension comes between them, and the next reshard ends it.
   Between two minibatches all workers may get BuildAhead.

A later JoinWorld begins another epoch. The next reshard brings the state into it; no update may come before that. Every
rank of the layout gets the same call, with whole minibatches, and does its part. A file of a publish or a save gets its
final name only when it is complete (`tidegate.elastic.state.files`).

Invariants:
- A refused call changes nothing. [test_worker: has_the_losses_of_a_fixed_one]
- A worker that lost a peer leaves its epoch, keeps its state, and reports the loss.
  [test_worker: members_that_lost_a_peer]
- An update is made once, however often it is requested. [test_worker: the_state_includes_is_not_repeated]
- An update has exactly the portions that its call counts. [test_worker: portions_of_another_number]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from services.actor import arena_folder
from services.actor.checkpoints import CheckpointError, files_of
from services.actor.epochs import Epochs
from services.actor.grpo_minibatch import GrpoMinibatch
from services.actor.keeper import Keeper
from services.actor.microbatch import Demonstration, TrainSample
from services.actor.settings import settings_of
from services.actor.trainer import MegatronTrainer
from services.actor.weights import WEIGHTS_REFUSED, export_weights, initial_weights
from tidegate.checksums import WrittenFile
from tidegate.codec import decode_layout, encode_layout
from tidegate.config.job_config import JobConfig
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.world import PeerLost, World
from tidegate.elastic.plan.layout import LayoutRefused
from tidegate.elastic.plan.saved_state import SavedStateRefused
from tidegate.elastic.report import ReshardReport
from tidegate.elastic.reshard_preparation import PreparedReshard
from tidegate.elastic.settings import CopyTo
from tidegate.elastic.state.files import FileCorrupt, StateFiles
from tidegate.job import Job, load_job, state_folder
from tidegate.runtime.pacer import Pacer
from tidegate.runtime.slot_clock import SlotState
from tidegate.runtime.slot_place import take_slot
from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.types import node_of
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire

_UPDATE = "update"
"""The key in the trainer's cursor of the id of the update that made its state.

Every rank commits it with the update, and it moves with the state to new members. A repeated update is recognised by it
and is not made again."""
_LR = "lr"
"""The key in the trainer's cursor of the state's learning-rate progress, as the mark of the lead's ledger."""
_RISE_STEPS = 20
"""The learning rate rises over this many steps of the warm-up: Adam's moments mean little before."""
_STATE_FROM = {
    "agreed": SlotState.BUILDING,
    "transferring": SlotState.TRANSFERRING,
    "copied": SlotState.SWITCHING,
    "proving": SlotState.SWITCHING,
}
"""The slot's state from a point of a reshard on, until the next of them. A late proof breaks into other work, which
goes on once it is "proved"."""


class _PreparedReshard(NamedTuple):
    """A reshard whose first phase is done, and which is neither committed nor aborted."""

    id: str
    prepared: PreparedReshard
    update: str
    """The update whose portions it carries. Empty: it carries none."""


class TrainerWorker:
    """Handles one worker's calls; see the module for their order."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._epochs = Epochs(channel)
        self._job: Job | None = None
        self._trainer: MegatronTrainer | None = None
        self._open: _PreparedReshard | None = None
        self._last_committed = ""
        self._broken_into: str = SlotState.TRAINING
        """The state of the slot before a late proof."""
        self._keeper = Keeper()
        self._last_update = wire.UpdateReport()
        self._open_update = ""
        """The update whose portions the trainer accumulates."""

    def handle(self, call: wire.WorkerCall) -> Iterator[Answer]:
        match call.WhichOneof("body"):
            case "join_world":
                yield self._join(call)
            case "start_actor":
                yield self._start(call)
            case "warm_up":
                yield from self._warm_up(call)
            case "train":
                yield self._train(call)
            case "accumulate":
                yield self._accumulate(call)
            case "publish":
                yield self._publish(call)
            case "save":
                yield self._save(call)
            case "export":
                yield self._export(call)
            case "prepare_reshard":
                yield self._prepare(call)
            case "build_ahead":
                yield self._build_ahead(call)
            case "commit_reshard":
                yield self._commit(call)
            case "abort_reshard":
                yield self._abort(call)
            case "prepare_suspension" | "commit_suspension" | "abort_suspension" as step:
                yield self._suspend(call, step)
            case other:
                raise CallRefused(
                    f"an actor worker does not handle {other!r}; send the call to the component that does"
                )

    def close(self) -> None:
        """Free the state's memory, its shared files included."""
        if self._trainer is not None:
            self._trainer.elastic.close()

    def _join(self, call: wire.WorkerCall) -> Answer:
        joined = call.join_world
        job = self._job or load_job(JobConfig.from_json(joined.config_json))
        place = take_slot(job.config.cluster, self._channel.grant.gpu)
        with self._peers(f"epoch {joined.epoch}"):
            world = self._epochs.enter(joined, place)
            # A reshard that was prepared in an epoch ends with that epoch.
            opened, self._open = self._open, None
            if opened is not None and self._trainer is not None:
                self._trainer.elastic.abort(opened.prepared)
            if self._trainer is not None:
                self._trainer.elastic.rejoin(world)
                detail = f"the state is of {self._trainer.elastic.progress.num_updates} updates"
            else:
                detail = self._make_trainer(job, world)
        self._job = job
        memory = psutil.Process().memory_info()
        return Answer(call.call_id, wire.Started(memory_bytes=memory.rss - memory.shared, detail=detail))

    def _make_trainer(self, job: Job, world: World) -> str:
        """Make the trainer. Returns the reason for where it keeps its state."""
        config, node = job.config, node_of(self._channel.grant.gpu)
        slots = [gpu for gpu in config.gpus if node_of(gpu) == node]
        choice = arena_folder.choose(
            state_folder(config, node),
            needed_bytes=arena_folder.most_bytes(
                job.num_parameters,
                num_members=len(slots),
                copies=CopyTo(config.actor.copies),
                precision=config.actor.precision,
                carries=config.actor.carries_gradients,
            ),
            device=world.device,
        )
        self._trainer = MegatronTrainer(
            settings_of(job),
            world,
            shared_memory=choice.folder,
            host_memory=choice.host_memory,
            weights=initial_weights(job),
            pacer=Pacer.of(config.cluster, self._channel.clock.count),
            on_point=self._at_point,
        )
        return choice.reason

    def _at_point(self, point: str) -> None:
        clock = self._channel.clock
        if point == "proving":
            self._broken_into = clock.state
        if point == "proved":
            clock.go_over(self._broken_into)
        elif (state := _STATE_FROM.get(point)) is not None:
            clock.go_over(state)

    def _start(self, call: wire.WorkerCall) -> Answer:
        start, elastic = call.start_actor, self._member().elastic
        if elastic.location is not None:
            raise CallRefused("the trainer is started already")
        layout, ranks = decode_layout(start.layout), tuple(start.ranks)
        with self._peers("the start"):
            try:
                if start.checkpoint_dir:
                    folder = Path(start.checkpoint_dir)
                    checkpoints.start_from(elastic, StateFiles(folder, files_of(folder)), layout, ranks=ranks)
                else:
                    elastic.start(layout, ranks=ranks)
            except (CheckpointError, FileCorrupt, SavedStateRefused) as error:
                raise CallRefused(f"checkpoint {start.checkpoint_dir}: {error}") from error
            except (LayoutRefused, *WEIGHTS_REFUSED) as error:
                raise CallRefused(str(error)) from error
        rss = psutil.Process().memory_info().rss
        return Answer(call.call_id, wire.Started(memory_bytes=rss, detail=f"{layout} on members {ranks}"))

    def _warm_up(self, call: wire.WorkerCall) -> Iterator[Answer]:
        job, trainer = self._training()
        warm_up = call.warm_up
        for step in range(warm_up.num_steps):
            first = step * warm_up.batch_size
            batch = [_demonstration(job, index) for index in range(first, first + warm_up.batch_size)]
            with self._peers(f"warm-up step {step}"):
                report = trainer.supervised_step(batch, warm_up.learning_rate * min(1.0, (step + 1) / _RISE_STEPS))
            if not report.committed:
                raise ArithmeticError(f"warm-up step {step}: loss {report.loss}, gradient norm {report.grad_norm}")
            progress = wire.WarmUpProgress(step=step + 1, num_steps=warm_up.num_steps, loss=report.loss)
            if step + 1 == warm_up.num_steps:
                trainer.reset_optimizer()
            yield Answer(call.call_id, progress, last=step + 1 == warm_up.num_steps)

    def _accumulate(self, call: wire.WorkerCall) -> Answer:
        _, trainer = self._training()
        portion = call.accumulate
        samples, update_id = _train_samples(portion.samples), portion.update_id
        _check_progress(trainer, update_id, portion.lr_before)
        self._check_portions(trainer, update_id, portion.num_before)
        self._open_update = update_id
        with self._peers(f"portion {portion.num_before} of update {update_id}"):
            trainer.accumulate(samples, bundle_sizes=portion.bundle_sizes)
        return Answer(call.call_id)

    def _check_portions(self, trainer: MegatronTrainer, update_id: str, num_before: int) -> None:
        """Drop what a call for a whole minibatch does not count. Raises CallRefused where the portions are others."""
        if num_before == 0:
            trainer.drop_portions()
        held = trainer.num_portions if self._open_update == update_id else 0
        if held != num_before:
            raise CallRefused(
                f"update {update_id} has {num_before} portions so far, and the gradients here are of {held}: begin "
                "again with its first portion"
            )

    def _train(self, call: wire.WorkerCall) -> Answer:
        _, trainer = self._training()
        samples, update_id = _train_samples(call.train.samples), call.train.update_id
        if trainer.elastic.cursor.get(_UPDATE) == update_id:
            # Avoid a second update: a repeated request gets the report of the first.
            has_report = self._last_update.update_id == update_id
            return Answer(
                call.call_id, self._last_update if has_report else _report_without_figures(update_id, trainer)
            )
        _check_progress(trainer, update_id, call.train.lr_before)
        self._check_portions(trainer, update_id, call.train.num_portions)
        cursor = {_UPDATE: update_id, _LR: call.train.lr_after}
        with self._peers(f"update {update_id}"):
            report = trainer.train_minibatch(
                samples, call.train.learning_rate, bundle_sizes=call.train.bundle_sizes, cursor=cursor
            )
        self._last_update = wire.UpdateReport(
            update_id=update_id,
            committed=report.committed,
            loss=report.loss,
            grad_norm=report.grad_norm,
            metrics=report.metrics,
            lr_mark=_lr_mark(trainer),
            learning_rates=trainer.learning_rates,
        )
        return Answer(call.call_id, self._last_update)

    def _publish(self, call: wire.WorkerCall) -> Answer:
        """Write this rank's shard. Among replicas, only one writes each weight."""
        trainer, file = self._holding()
        with self._peers("a publish"):
            written = checkpoints.save_weights(trainer.elastic, Path(call.publish.folder), file)
        shard = wire.PublishedShard(weights_sum=checkpoints.weights_sum(trainer.elastic), **_shard_fields(written))
        return Answer(call.call_id, shard)

    def _save(self, call: wire.WorkerCall) -> Answer:
        trainer, file = self._holding()
        with self._peers("a save"):
            written = checkpoints.save(trainer.elastic, Path(call.save.folder), file)
        return Answer(call.call_id, wire.SavedShard(**_shard_fields(written)))

    def _export(self, call: wire.WorkerCall) -> Answer:
        export, job = call.export, self._job
        if job is None:
            raise CallRefused("the worker has no job yet; send JoinWorld and StartActor first")
        try:
            export_weights(job, Path(export.checkpoint_dir), Path(export.folder))
        except (*WEIGHTS_REFUSED, CheckpointError, FileCorrupt, SavedStateRefused, OSError) as error:
            raise CallRefused(f"export of {export.checkpoint_dir} to {export.folder}: {error}") from error
        return Answer(call.call_id)

    def _prepare(self, call: wire.WorkerCall) -> Answer:
        request, elastic = call.prepare_reshard, self._member().elastic
        if self._open is not None and self._open.id != request.id:
            raise CallRefused(f"reshard {self._open.id} is not decided yet: commit or abort it before {request.id}")
        if self._open is None:
            with self._peers(f"reshard {request.id}"):
                try:
                    mesh = elastic.mesh_of(decode_layout(request.layout), tuple(request.ranks))
                    prepared = elastic.prepare(mesh, name=request.id, portions=self._portions(request.portions))
                    update = request.portions[0].update_id if request.portions else ""
                    self._open = _PreparedReshard(request.id, prepared, update)
                except PeerLost:
                    raise
                # After any error, the first phase has freed its memory and the old layout is as it was.
                except Exception as error:
                    raise CallRefused(f"reshard {request.id}: {type(error).__name__}: {error}") from error
        return Answer(call.call_id, _encode_report(self._open.prepared.report()))

    def _portions(self, asked: Iterable[wire.Accumulate]) -> list[GrpoMinibatch]:
        trainer = self._member()
        found: list[GrpoMinibatch] = []
        for portion in asked:
            found.append(trainer.portion(_train_samples(portion.samples), portion.bundle_sizes, before=found))
        return found

    def _build_ahead(self, call: wire.WorkerCall) -> Answer:
        """While building, a lost peer costs this layout and nothing else: the ranks of the present one go on."""
        request, elastic = call.build_ahead, self._member().elastic
        if self._open is not None:
            raise CallRefused(f"reshard {self._open.id} is not decided yet: commit or abort it first")
        with self._peers("the proof of the last switch"):
            elastic.prove()
        try:
            mesh = elastic.mesh_of(decode_layout(request.layout), tuple(request.ranks))
            kept_bytes = elastic.build_ahead(mesh, keeps_memory=request.keeps_memory)
        except PeerLost as error:
            raise CallRefused(f"{mesh.layout} ahead: {error}") from error
        except Exception as error:  # noqa: BLE001 - the edge: it failed on all members and left nothing
            return Answer(call.call_id, wire.BuiltAhead(reason=f"{type(error).__name__}: {error}"))
        return Answer(call.call_id, wire.BuiltAhead(is_built=True, kept_bytes=kept_bytes))

    def _commit(self, call: wire.WorkerCall) -> Answer:
        name, elastic = call.commit_reshard.id, self._member().elastic
        if name == self._last_committed:
            return Answer(call.call_id, wire.Committed(in_epoch=True))
        if self._open is None or self._open.id != name:
            raise CallRefused(f"reshard {name} is not prepared here; open: {self._open.id if self._open else 'none'}")
        opened, self._open, self._last_committed = self._open, None, name
        self._open_update = opened.update
        try:
            elastic.commit(opened.prepared)
        except PeerLost as error:
            # This member has switched. The lead makes the next epoch for one that has not, or was late.
            self._epochs.leave(f"at the commit of reshard {name}: {error}")
            return Answer(call.call_id, wire.Committed(in_epoch=False))
        return Answer(call.call_id, wire.Committed(in_epoch=True))

    def _abort(self, call: wire.WorkerCall) -> Answer:
        name = call.abort_reshard.id
        if name == self._last_committed:
            raise CallRefused(f"reshard {name} is committed and cannot be aborted")
        if self._open is not None and self._open.id == name:
            prepared, self._open = self._open.prepared, None
            self._member().elastic.abort(prepared)
        # A worker that lost a peer has nothing to abort, and cannot go on in this epoch: refuse, to let the caller
        # know.
        self._member()
        return Answer(call.call_id)

    def _suspend(self, call: wire.WorkerCall, step: str) -> Answer:
        if self._trainer is None:
            raise CallRefused("the trainer is not started; send JoinWorld and StartActor first")
        if self._open is not None:
            raise CallRefused(f"reshard {self._open.id} is not decided yet: commit or abort it before a suspension")
        elastic = self._trainer.elastic
        match step:
            case "prepare_suspension":
                self._keeper.prepare(call.prepare_suspension.id, elastic)
            case "commit_suspension":
                return Answer(call.call_id, self._keeper.commit(call.commit_suspension.id, elastic))
            case _:
                self._keeper.abort(call.abort_suspension.id, elastic)
        return Answer(call.call_id)

    def _member(self) -> MegatronTrainer:
        """The trainer. Raises CallRefused where this worker is in no epoch."""
        world = self._epochs.world
        assert self._trainer is not None
        assert self._trainer.elastic.world is world
        return self._trainer

    def _training(self) -> tuple[Job, MegatronTrainer]:
        """The job and the trainer. Raises CallRefused where this worker may not train."""
        trainer, _ = self._holding()
        location, epoch = trainer.elastic.location, self._epochs.world.membership.epoch
        assert self._job is not None
        if location is None or location.epoch != epoch:
            raise CallRefused(f"the state is of epoch {location and location.epoch}, this is {epoch}: reshard it first")
        return self._job, trainer

    def _holding(self) -> tuple[MegatronTrainer, str]:
        """The trainer, and the name of this rank's file.

        Raises CallRefused where this worker holds no part of the state."""
        trainer = self._trainer
        if trainer is None or trainer.elastic.location is None:
            raise CallRefused("the trainer is not started; send JoinWorld and StartActor first")
        mesh, me = trainer.elastic.location.mesh, trainer.elastic.world.me
        if me not in mesh.ranks:
            raise CallRefused(f"member {me} stands by: the layout is on members {mesh.ranks}")
        if trainer.elastic.is_suspended:
            raise CallRefused("the state is in host memory alone: reshard it first")
        return trainer, rank_file(mesh.ranks.index(me))

    @contextmanager
    def _peers(self, what: str) -> Iterator[None]:
        """On the loss of a peer, leave the epoch, so that no other member waits for this one."""
        try:
            yield
        except PeerLost as error:
            self._epochs.leave(f"{what}: {error}")
            raise CallRefused(f"{what}: {error}; this worker has left the epoch: send JoinWorld to all") from error


def _report_without_figures(update_id: str, trainer: MegatronTrainer) -> wire.UpdateReport:
    """The report of an update that the other ranks made before this one received its state."""
    return wire.UpdateReport(
        update_id=update_id,
        committed=True,
        loss=math.nan,
        grad_norm=math.nan,
        lr_mark=_lr_mark(trainer),
        learning_rates=trainer.learning_rates,
    )


def _check_progress(trainer: MegatronTrainer, update_id: str, lr_before: str) -> None:
    """Raises CallRefused where the state is of another learning-rate progress than the update follows."""
    if (held := _lr_mark(trainer)) != lr_before:
        raise CallRefused(
            f"update {update_id} follows {lr_before or 'no update'}, and the state here is of {held or 'no update'}: "
            "resume all ranks from one checkpoint"
        )


def _lr_mark(trainer: MegatronTrainer) -> str:
    """The learning-rate progress of the state. Empty before the first update."""
    return str(trainer.elastic.cursor.get(_LR, ""))


def rank_file(rank: int) -> str:
    """The name of a rank's file in a snapshot or a checkpoint."""
    return f"rank{rank:05d}.safetensors"


def _shard_fields(written: WrittenFile | None) -> dict[str, Any]:
    """The fields of a written file. Empty where this rank has nothing to write."""
    return {} if written is None else asdict(written)


def _encode_report(report: ReshardReport) -> types_pb2.ReshardReport:
    return types_pb2.ReshardReport(
        source=encode_layout(report.source),
        target=encode_layout(report.target),
        moved_bytes=report.moved_bytes,
        minimum_bytes=report.minimum_bytes,
        local_bytes=report.local_bytes,
        certificate=report.certificate,
        num_updates=report.num_updates,
        seconds=report.seconds,
        was_built=report.was_built,
    )


def _demonstration(job: Job, index: int) -> Demonstration:
    assert job.task is not None, "the config allows a warm-up only with a built-in task"
    demonstration = job.task.demonstration(index)
    prompt = job.tokenizer.encode_prompt(demonstration.prompt.text)
    response = job.tokenizer.encode_response(demonstration.response)
    return Demonstration(tokens=(*prompt, *response), loss_mask=(False,) * len(prompt) + (True,) * len(response))


def _train_samples(wired: Iterable[wire.TrainSample]) -> list[TrainSample]:
    """Raises CallRefused."""
    try:
        return [_train_sample(sample) for sample in wired]
    except ValueError as error:
        raise CallRefused(str(error)) from error


def _train_sample(wired: wire.TrainSample) -> TrainSample:
    return TrainSample(
        prompt_tokens=tuple(wired.prompt_tokens),
        response_tokens=tuple(wired.response_tokens),
        advantage=wired.advantage,
        old_log_probs=tuple(wired.old_log_probs),
        reference_log_probs=tuple(wired.reference_log_probs),
        engine_log_probs=tuple(wired.engine_log_probs),
        masked=wired.masked,
    )


def main(channel: WorkerChannel) -> None:
    """The worker's entry, in the forked process."""
    worker = TrainerWorker(channel)
    run_worker(channel, worker, waits_for="minibatch")
    # Close only after an orderly end: a failed worker's shared memory may hold the only copy of its state.
    worker.close()
