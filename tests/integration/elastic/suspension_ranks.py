"""The rank processes of the tests of a suspended job."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from tests.integration.elastic.trainer_ranks import LEARNING_RATE, logical_state, minibatch, same, started
from tests.integration.elastic.world_ranks import join
from tests.ranks import RankContext, Results
from tidegate.elastic.plan.recovery import StateLost
from tidegate.elastic.trainer import ElasticTrainer, JobSuspended
from tidegate.types import Layout


def suspended_between(
    context: RankContext, *, places: list[dict[str, Any]], updates_between: int = 1, **options: Any
) -> Results:
    """Train through all the places; the job is suspended before each but the first.

    `training`, `resting`: the bytes of this member in gradients, in tensors of its own memory, and in the files of all,
    before and during each suspension.
    """
    updates: list[tuple[float, float]] = []
    training, resting, moved, refusals, certificates = [], [], [], [], []

    def train(trainer: ElasticTrainer) -> None:
        for _ in range(updates_between):
            update = trainer.train_minibatch(minibatch(len(updates)), LEARNING_RATE)
            updates.append((update.sums[0], update.grad_norm) if update else (np.nan, np.nan))

    first, *others = places
    with started(context, Layout(**first["layout"]), first.get("ranks"), **options) as trainer:
        train(trainer)
        for place in others:
            training.append(_taken(trainer, context))
            suspend(trainer)
            resting.append(_taken(trainer, context))
            refusals.append(_refusal(trainer))
            report = trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"))
            moved.append((report.moved_bytes, report.minimum_bytes))
            certificates.append(report.certificate)
            train(trainer)
        final = logical_state(trainer)
    figures = {
        "updates": np.array(updates),
        "training": np.array(training),
        "resting": np.array(resting),
        "moved": np.array(moved),
        "refusals": np.array(refusals),
        "certificates": np.array(certificates),
        "left": np.array([path.name for path in context.tmpfs.glob("epoch*")]),
    }
    return figures | {f"final/{key}": value for key, value in final.items()}


def suspend(trainer: ElasticTrainer) -> None:
    """Every member does the first phase before any does the second. No member measures before all have done it."""
    everyone = trainer.world.membership.members
    trainer.world.barrier(everyone)
    trainer.prepare_suspension()
    trainer.world.barrier(everyone)
    trainer.suspend()
    trainer.world.barrier(everyone)


def _taken(trainer: ElasticTrainer, context: RankContext) -> tuple[int, int, int]:
    trainer.world.barrier(trainer.world.membership.members)
    location = trainer.location
    assert location is not None
    in_files = sum(path.stat().st_blocks * 512 for path in context.tmpfs.glob("epoch*"))
    if location.state is None:
        return 0, 0, in_files
    skeleton = location.state.skeleton
    gradients = gradient_bytes(skeleton)
    tensors = sum(tensor.untyped_storage().nbytes() for tensor in skeleton.tensors().values())
    return gradients, tensors, in_files


def gradient_bytes(skeleton: Any) -> int:
    """The memory of its gradient buffers."""
    buffers = [buffer for chunk in skeleton.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def _refusal(trainer: ElasticTrainer) -> str:
    try:
        trainer.train_minibatch(minibatch(0), LEARNING_RATE)
    except JobSuspended as error:
        return str(error)
    return "it trained"


def keeper_dies(context: RankContext, *, victim: int, shards: int, **options: Any) -> Results:
    """Two updates on members 1 and 2, a suspension, the death of `victim`, and
    two updates on members 3 and 0, which had no part of the state.
    """
    updates: list[tuple[float, float]] = []
    error, report = "", ""

    def train(trainer: ElasticTrainer) -> None:
        update = trainer.train_minibatch(minibatch(len(updates)), LEARNING_RATE)
        updates.append((update.sums[0], update.grad_norm) if update else (np.nan, np.nan))

    with started(context, Layout(dp=2), (1, 2), shards=shards, **options) as trainer:
        train(trainer)
        train(trainer)
        suspend(trainer)
        if context.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        store = trainer.world.store
        trainer.world.leave(abort=True)
        survivors = tuple(rank for rank in range(context.world_size) if rank != victim)
        trainer.rejoin(join(context, store, epoch=2, members=survivors))
        try:
            found = trainer.reshard(Layout(pp=2), ranks=(3, 0))
            report = f"{found.lost} {dict(found.restored)} {found.num_updates}"
            train(trainer)
            train(trainer)
        except StateLost as lost:
            error = str(lost)
        # Member 0 serves the store.
        trainer.world.barrier(survivors)
    return {"updates": np.array(updates), "error": np.array(error), "report": np.array(report)}


def one_cannot_keep(context: RankContext) -> Results:
    """Member 1 cannot keep its state at first. All go on in the old layout, then are suspended and resumed."""
    with started(context, Layout(dp=2), shared=False, keeps_files=True) as trainer:
        trainer.train_minibatch(minibatch(0), LEARNING_RATE)
        before, error = logical_state(trainer), ""
        assert trainer.location is not None
        assert trainer.location.state is not None
        kept = trainer.location.state.kept
        assert kept is not None
        assert kept.path is not None
        if context.rank == 1:
            kept.path.write_bytes(b"")
            try:
                trainer.prepare_suspension()
            except FileExistsError as failure:
                error = str(failure)
            kept.path.unlink()
        else:
            trainer.prepare_suspension()
        trainer.abort_suspension()
        kept_bytes, is_offered = kept.num_bytes, kept.note() is not None
        is_same = same(before, logical_state(trainer))
        trainer.train_minibatch(minibatch(1), LEARNING_RATE)
        before = logical_state(trainer)
        suspend(trainer)
        trainer.reshard(Layout(dp=2))
        is_same = is_same and same(before, logical_state(trainer))
        trainer.world.barrier(trainer.world.membership.members)
    return {
        "error": np.array(error),
        "kept_bytes": np.array(kept_bytes),
        "is_offered": np.array(is_offered),
        "is_same": np.array(is_same),
    }
