"""An actor worker: one member of the actor's world, driven by its instance's calls.

Order: JoinWorld, of all workers alike, those that stand by too; StartActor, of all alike; then updates, publishes and
saves of those in the layout, and reshards of all alike: PrepareReshard, then CommitReshard or AbortReshard. A later
JoinWorld goes on in another epoch; the state comes into it by the next reshard, and nothing is trained before.
Every rank of the layout gets every call alike, whole minibatches included, and takes its part. Invariants: a call that
is refused changed nothing; a worker that lost a peer leaves its epoch, keeps its state, and says so; an update is made
once, however often it is asked for; what a rank publishes or saves has its name only when it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from services.actor import arena_folder
from services.actor.checkpoints import CheckpointError, files_of
from services.actor.epochs import Epochs
from services.actor.grpo import Aggregation, GrpoSettings, OldLogProbs
from services.actor.microbatch import Demonstration, TrainSample
from services.actor.settings import OptimizerSettings, TrainerSettings, limits_of
from services.actor.trainer import MegatronTrainer
from services.actor.weights import WEIGHTS_REFUSED, export_weights, initial_weights
from tidegate.checksums import WrittenFile
from tidegate.codec import decode_layout, encode_layout
from tidegate.config.job_config import JobConfig
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.world import PeerLost, World
from tidegate.elastic.plan.layout import LayoutRefused
from tidegate.elastic.plan.saved import SavedStateRefused
from tidegate.elastic.preparing import Prepared
from tidegate.elastic.report import ReshardReport
from tidegate.elastic.settings import CopyTo
from tidegate.elastic.state.files import FileCorrupt, StateFiles
from tidegate.job import Job, load_job, state_folder
from tidegate.megatron.family import model_parameters
from tidegate.megatron.worker_rank import slot_device
from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.types import Role, node_of
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire

_UPDATE = "update"
"""In the trainer's cursor: which update made its state. It is committed with it, on every rank, and follows the state
to whoever comes; one that is asked for again is not made again."""
_LR = "lr"
"""In the trainer's cursor: the learning-rate progress of that state, as the lead's ledger marks it."""
_RISE_STEPS = 20
"""Of the warm-up, over which its learning rate rises: Adam's moments mean little before."""


class _Open(NamedTuple):
    """A reshard whose first phase is done."""

    id: str
    prepared: Prepared


class TrainerWorker:
    """Handler of one worker's calls."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._epochs = Epochs(channel)
        self._job: Job | None = None
        self._trainer: MegatronTrainer | None = None
        self._open: _Open | None = None
        self._last_committed = ""
        self._last_update = wire.UpdateReport()

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
            case "publish":
                yield self._publish(call)
            case "save":
                yield self._save(call)
            case "export":
                yield self._export(call)
            case "prepare_reshard":
                yield self._prepare(call)
            case "commit_reshard":
                yield self._commit(call)
            case "abort_reshard":
                yield self._abort(call)
            case other:
                raise CallRefused(f"an actor worker does not do {other!r}; send it to the component that does")

    def close(self) -> None:
        """Give the state's memory back, files that others could read too."""
        if self._trainer is not None:
            self._trainer.elastic.close()

    def _join(self, call: wire.WorkerCall) -> Answer:
        joined = call.join_world
        job = self._job or load_job(JobConfig.from_json(joined.config_json))
        device = slot_device(job, self._channel)
        with self._peers(f"epoch {joined.epoch}"):
            world = self._epochs.enter(joined, device)
            # What was prepared in an epoch is given up with it.
            self._open = None
            if self._trainer is not None:
                self._trainer.elastic.rejoin(world)
                detail = f"the state is of {self._trainer.elastic.progress.num_updates} updates"
            else:
                detail = self._make_trainer(job, world)
        self._job = job
        memory = psutil.Process().memory_info()
        return Answer(call.call_id, wire.Started(memory_bytes=memory.rss - memory.shared, detail=detail))

    def _make_trainer(self, job: Job, world: World) -> str:
        """How the state will be held."""
        config, node = job.config, node_of(self._channel.grant.gpu)
        slots = [gpu for gpu in (*config.placement(Role.ACTOR), *config.standby()) if node_of(gpu) == node]
        parameters = model_parameters(job.model, padded_vocab=job.padded_vocab)
        num_parameters = sum(math.prod(parameter.shape) for parameter in parameters)
        choice = arena_folder.choose(
            state_folder(config, node),
            needed_bytes=arena_folder.most_bytes(
                num_parameters,
                num_members=len(slots),
                copies=CopyTo(config.actor.copies),
                precision=config.actor.precision,
            ),
            device=world.device,
        )
        self._trainer = MegatronTrainer(
            _settings(job), world, shared_memory=choice.folder, weights=initial_weights(job)
        )
        return choice.reason

    def _start(self, call: wire.WorkerCall) -> Answer:
        start, elastic = call.start_actor, self._member().elastic
        if elastic.held is not None:
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
        asked = call.warm_up
        for step in range(asked.num_steps):
            first = step * asked.batch_size
            batch = [_demonstration(job, index) for index in range(first, first + asked.batch_size)]
            with self._peers(f"warm-up step {step}"):
                report = trainer.supervised_step(batch, asked.learning_rate * min(1.0, (step + 1) / _RISE_STEPS))
            if not report.committed:
                raise ArithmeticError(f"warm-up step {step}: loss {report.loss}, gradient norm {report.grad_norm}")
            progress = wire.WarmUpProgress(step=step + 1, num_steps=asked.num_steps, loss=report.loss)
            if step + 1 == asked.num_steps:
                trainer.reset_optimizer()
            yield Answer(call.call_id, progress, last=step + 1 == asked.num_steps)

    def _train(self, call: wire.WorkerCall) -> Answer:
        _, trainer = self._training()
        try:
            samples = [_train_sample(sample) for sample in call.train.samples]
        except ValueError as error:
            raise CallRefused(str(error)) from error
        update_id = call.train.update_id
        if trainer.elastic.cursor.get(_UPDATE) == update_id:
            known = self._last_update.update_id == update_id
            return Answer(call.call_id, self._last_update if known else _made_before(update_id, trainer))
        if (held := _lr_mark(trainer)) != call.train.lr_before:
            raise CallRefused(
                f"update {update_id} follows {call.train.lr_before or 'no update'}, and the state here is of "
                f"{held or 'no update'}: resume all ranks from one checkpoint"
            )
        cursor = {_UPDATE: update_id, _LR: call.train.lr_after}
        with self._peers(f"update {update_id}"):
            report = trainer.train_minibatch(samples, call.train.learning_rate, cursor=cursor)
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
        """Every rank writes its share: of replicas one has each weight."""
        trainer, file = self._holding()
        written = checkpoints.save_weights(trainer.elastic, Path(call.publish.folder), file)
        shard = wire.PublishedShard(weights_sum=checkpoints.weights_sum(trainer.elastic), **_told(written))
        return Answer(call.call_id, shard)

    def _save(self, call: wire.WorkerCall) -> Answer:
        trainer, file = self._holding()
        written = checkpoints.save(trainer.elastic, Path(call.save.folder), file)
        return Answer(call.call_id, wire.SavedShard(**_told(written)))

    def _export(self, call: wire.WorkerCall) -> Answer:
        asked, job = call.export, self._job
        if job is None:
            raise CallRefused("the worker has no job yet; send JoinWorld and StartActor first")
        try:
            export_weights(job, Path(asked.checkpoint_dir), Path(asked.folder))
        except (*WEIGHTS_REFUSED, CheckpointError, FileCorrupt, SavedStateRefused, OSError) as error:
            raise CallRefused(f"export of {asked.checkpoint_dir} to {asked.folder}: {error}") from error
        return Answer(call.call_id)

    def _prepare(self, call: wire.WorkerCall) -> Answer:
        asked, elastic = call.prepare_reshard, self._member().elastic
        if self._open is not None and self._open.id != asked.id:
            raise CallRefused(f"reshard {self._open.id} is not decided yet: commit or abort it before {asked.id}")
        if self._open is None:
            with self._peers(f"reshard {asked.id}"):
                try:
                    mesh = elastic.mesh_of(decode_layout(asked.layout), tuple(asked.ranks))
                    self._open = _Open(asked.id, elastic.prepare(mesh, name=asked.id))
                except PeerLost:
                    raise
                # Whatever it is, the first phase has given back what it took, and the old layout is as it was.
                except Exception as error:
                    raise CallRefused(f"reshard {asked.id}: {type(error).__name__}: {error}") from error
        return Answer(call.call_id, _encode_report(self._open.prepared.report()))

    def _commit(self, call: wire.WorkerCall) -> Answer:
        asked, elastic = call.commit_reshard.id, self._member().elastic
        if asked == self._last_committed:
            return Answer(call.call_id, wire.Committed(in_epoch=True))
        if self._open is None or self._open.id != asked:
            raise CallRefused(f"reshard {asked} is not prepared here; open: {self._open.id if self._open else 'none'}")
        prepared, self._open, self._last_committed = self._open.prepared, None, asked
        try:
            elastic.commit(prepared)
        except PeerLost as error:
            # This member has switched; for one that has not, or was late, the next epoch is made.
            self._epochs.leave(f"at the commit of reshard {asked}: {error}")
            return Answer(call.call_id, wire.Committed(in_epoch=False))
        return Answer(call.call_id, wire.Committed(in_epoch=True))

    def _abort(self, call: wire.WorkerCall) -> Answer:
        asked = call.abort_reshard.id
        if asked == self._last_committed:
            raise CallRefused(f"reshard {asked} is committed: there is no way back")
        if self._open is not None and self._open.id == asked:
            prepared, self._open = self._open.prepared, None
            self._member().elastic.abort(prepared)
        # Who lost a peer on the way has nothing to give up, and cannot go on here: refused, so that the caller knows.
        self._member()
        return Answer(call.call_id)

    def _member(self) -> MegatronTrainer:
        """The trainer of a worker that is in an epoch."""
        world = self._epochs.world
        assert self._trainer is not None
        assert self._trainer.elastic.world is world
        return self._trainer

    def _training(self) -> tuple[Job, MegatronTrainer]:
        """Of a worker that may train."""
        trainer, _ = self._holding()
        held, epoch = trainer.elastic.held, self._epochs.world.membership.epoch
        assert self._job is not None
        if held is None or held.epoch != epoch:
            raise CallRefused(f"the state is of epoch {held and held.epoch}, this is {epoch}: reshard it first")
        return self._job, trainer

    def _holding(self) -> tuple[MegatronTrainer, str]:
        """Of a worker that holds a part of the state, with the name of its file."""
        trainer = self._trainer
        if trainer is None or trainer.elastic.held is None:
            raise CallRefused("the trainer is not started; send JoinWorld and StartActor first")
        mesh, me = trainer.elastic.held.mesh, trainer.elastic.world.me
        if me not in mesh.ranks:
            raise CallRefused(f"member {me} stands by: the layout is on members {mesh.ranks}")
        return trainer, rank_file(mesh.ranks.index(me))

    @contextmanager
    def _peers(self, what: str) -> Iterator[None]:
        """Who loses a peer leaves the epoch, so that none of the others waits for it, and goes on in the next."""
        try:
            yield
        except PeerLost as error:
            self._epochs.leave(f"{what}: {error}")
            raise CallRefused(f"{what}: {error}; this worker has left the epoch: send JoinWorld to all") from error


def _made_before(update_id: str, trainer: MegatronTrainer) -> wire.UpdateReport:
    """By the ranks that were there: this one has come with its state."""
    return wire.UpdateReport(
        update_id=update_id,
        committed=True,
        loss=math.nan,
        grad_norm=math.nan,
        lr_mark=_lr_mark(trainer),
        learning_rates=trainer.learning_rates,
    )


def _lr_mark(trainer: MegatronTrainer) -> str:
    """The learning-rate progress of the state; empty before the first update."""
    return str(trainer.elastic.cursor.get(_LR, ""))


def rank_file(rank: int) -> str:
    """The name of a rank's file in a snapshot or a checkpoint."""
    return f"rank{rank:05d}.safetensors"


def _told(written: WrittenFile | None) -> dict[str, Any]:
    """Of a share; of none, nothing."""
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
    )


def _settings(job: Job) -> TrainerSettings:
    algorithm, actor = job.config.algorithm, job.config.actor
    return TrainerSettings(
        model=job.model,
        padded_vocab=job.padded_vocab,
        seed=job.config.seed,
        temperature=algorithm.temperature,
        limits=limits_of(actor, job.model),
        grpo=GrpoSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coefficient=algorithm.kl_coefficient,
            aggregation=Aggregation(algorithm.loss_aggregation),
            old_log_probs=OldLogProbs(algorithm.old_logprobs),
            importance_cap=algorithm.importance_cap,
            max_new_tokens=algorithm.max_new_tokens,
        ),
        copies=CopyTo(actor.copies),
        num_logical_shards=actor.num_logical_shards,
        precision=actor.precision,
        recompute=actor.recompute,
        optimizer=OptimizerSettings(
            weight_decay=actor.weight_decay,
            adam_beta1=actor.adam_beta1,
            adam_beta2=actor.adam_beta2,
            adam_epsilon=actor.adam_epsilon,
            clip_grad=actor.clip_grad,
        ),
    )


def _demonstration(job: Job, index: int) -> Demonstration:
    assert job.task is not None, "the config was checked: only a built-in task is warmed up on"
    shown = job.task.demonstration(index)
    prompt = job.tokenizer.encode_prompt(shown.prompt.text)
    response = job.tokenizer.encode_response(shown.response)
    return Demonstration(tokens=(*prompt, *response), loss_mask=(False,) * len(prompt) + (True,) * len(response))


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
    # Only after an orderly end: what a failed worker leaves in shared memory may be all that is left of its state.
    worker.close()
