"""An actor worker: one rank of the trainer, driven by its instance's calls.

Every rank of the world gets every call alike, whole minibatches included, and takes its part. Invariants: a call that
is refused changed nothing; what a rank publishes or saves has its name only when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from services.actor.checkpoints import CheckpointError, files_of
from services.actor.grpo import Aggregation, GrpoSettings, OldLogProbs
from services.actor.microbatch import Demonstration, TrainSample
from services.actor.settings import OptimizerSettings, TrainerSettings
from services.actor.trainer import MegatronTrainer
from tidegate.config import JobConfig
from tidegate.elastic.files import FileCorrupt, StateFiles
from tidegate.elastic.saved import SavedStateRefused
from tidegate.job import Job, load_job
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.worker_rank import join_world, slot_device
from tidegate.runtime.worker import Answer, CallRefused, WorkerChannel, run_worker
from tidegate.v1 import workers_pb2 as wire

_RISE_STEPS = 20
"""Of the warm-up, over which its learning rate rises: Adam's moments mean little before."""


class TrainerWorker:
    """Handler of one rank's calls."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._job: Job | None = None
        self._trainer: MegatronTrainer | None = None
        self._world = wire.JoinWorld()
        self._rank = 0

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
            case other:
                raise CallRefused(f"an actor worker does not do {other!r}; send it to the component that does")

    def _join(self, call: wire.WorkerCall) -> Answer:
        self._world.CopyFrom(call.join_world)
        return Answer(call.call_id, wire.Started(memory_bytes=psutil.Process().memory_info().rss))

    def _start(self, call: wire.WorkerCall) -> Answer:
        if self._trainer is not None:
            raise CallRefused("the trainer is started already")
        start, world = call.start_actor, self._world
        if list(start.ranks) != list(world.members):
            raise CallRefused(f"members {list(start.ranks)} are to train in a world of members {list(world.members)}")
        job = load_job(JobConfig.from_json(start.config_json))
        device = slot_device(job, self._channel)
        ranks = join_world(world.rendezvous, start.layout, self._channel, device=device, seed=job.config.seed)
        trainer = MegatronTrainer(_settings(job), ranks, device=device)
        self._rank = world.rendezvous.rank
        if start.checkpoint_dir:
            folder = Path(start.checkpoint_dir)
            try:
                trainer.load(StateFiles(folder, files_of(folder)))
            except (CheckpointError, FileCorrupt, SavedStateRefused) as error:
                raise CallRefused(f"checkpoint {folder}: {error}") from error
        self._job, self._trainer = job, trainer
        return Answer(call.call_id, wire.Started(memory_bytes=psutil.Process().memory_info().rss, detail=str(ranks)))

    def _warm_up(self, call: wire.WorkerCall) -> Iterator[Answer]:
        job, trainer = self._started()
        asked = call.warm_up
        for step in range(asked.num_steps):
            first = step * asked.batch_size
            batch = [_demonstration(job, index) for index in range(first, first + asked.batch_size)]
            report = trainer.supervised_step(batch, asked.learning_rate * min(1.0, (step + 1) / _RISE_STEPS))
            if not report.committed:
                raise ArithmeticError(f"warm-up step {step}: loss {report.loss}, gradient norm {report.grad_norm}")
            progress = wire.WarmUpProgress(step=step + 1, num_steps=asked.num_steps, loss=report.loss)
            if step + 1 == asked.num_steps:
                trainer.reset_optimizer()
            yield Answer(call.call_id, progress, last=step + 1 == asked.num_steps)

    def _train(self, call: wire.WorkerCall) -> Answer:
        _, trainer = self._started()
        try:
            samples = [_train_sample(sample) for sample in call.train.samples]
        except ValueError as error:
            raise CallRefused(str(error)) from error
        report = trainer.train_minibatch(samples, call.train.learning_rate)
        return Answer(
            call.call_id,
            wire.UpdateReport(
                update_id=call.train.update_id,
                committed=report.committed,
                loss=report.loss,
                grad_norm=report.grad_norm,
                metrics=report.metrics,
            ),
        )

    def _publish(self, call: wire.WorkerCall) -> Answer:
        """Every rank writes its share: of replicas one has each weight."""
        _, trainer = self._started()
        written = trainer.publish(Path(call.publish.folder), rank_file(self._rank))
        if written is None:
            return Answer(call.call_id, wire.PublishedShard())
        return Answer(
            call.call_id,
            wire.PublishedShard(file=written.file, size_bytes=written.size_bytes, checksum=written.checksum),
        )

    def _save(self, call: wire.WorkerCall) -> Answer:
        _, trainer = self._started()
        written = trainer.save(Path(call.save.folder), rank_file(self._rank))
        if written is None:
            return Answer(call.call_id, wire.SavedShard())
        saved = wire.SavedShard(file=written.file, size_bytes=written.size_bytes, checksum=written.checksum)
        return Answer(call.call_id, saved)

    def _started(self) -> tuple[Job, MegatronTrainer]:
        if self._job is None or self._trainer is None:
            raise CallRefused("the trainer is not started; send StartActor first")
        return self._job, self._trainer


def rank_file(rank: int) -> str:
    """The name of a rank's file in a snapshot or a checkpoint."""
    return f"rank{rank:05d}.safetensors"


def _settings(job: Job) -> TrainerSettings:
    algorithm, actor = job.config.algorithm, job.config.actor
    return TrainerSettings(
        model=job.model,
        padded_vocab=job.padded_vocab,
        seed=job.config.seed,
        temperature=algorithm.temperature,
        limits=BatchLimits(max_sequences=actor.micro_batch_size),
        grpo=GrpoSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coefficient=algorithm.kl_coefficient,
            aggregation=Aggregation(algorithm.loss_aggregation),
            old_log_probs=OldLogProbs(algorithm.old_logprobs),
            importance_cap=algorithm.importance_cap,
        ),
        optimizer=OptimizerSettings(
            weight_decay=actor.weight_decay,
            adam_beta1=actor.adam_beta1,
            adam_beta2=actor.adam_beta2,
            clip_grad=actor.clip_grad,
        ),
    )


def _demonstration(job: Job, index: int) -> Demonstration:
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
    run_worker(channel, TrainerWorker(channel), waits_for="minibatch")
