"""The rank processes of the tests of switches that are proved late."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.integration.elastic.trainer_ranks import LEARNING_RATE, logical_state, minibatch, same, started
from tests.integration.elastic.world_ranks import join, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.world import PeerLost
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.types import Layout

HOME, NEXT = Layout(dp=2), Layout(tp=2, dp=2)


def damaged(context: RankContext, *, member: int, carries: bool, by: float) -> Results:
    """An update, a switch after which one member adds this to one element, and the update that finds out. Then the next
    epoch, the same switch again, and two updates.

    `left`: the first epoch's files after that.
    """
    store, trainers = open_store(context), list[ElasticTrainer]()
    everyone = tuple(range(context.world_size))

    def on_point(point: str) -> None:
        if point == "all_switched" and context.rank == member and trainers[0].world.membership.epoch == 1:
            weights = next(iter(trainers[0].state.skeleton.tensors().values()))
            weights.view(-1)[0] += by

    updates: list[tuple[float, float]] = []
    with started(context, HOME, late=True, on_point=on_point, store=store, ends_world=False) as trainer:
        trainers.append(trainer)
        portions = [minibatch(100)] if carries else []

        def train(number: int) -> None:
            if trainer.portions != tuple(portions):
                for portion in portions:
                    trainer.accumulate(portion)
            update = trainer.train_minibatch(minibatch(number), LEARNING_RATE)
            updates.append((update.sums[0], update.grad_norm) if update else (np.nan, np.nan))

        train(0)
        before, home = logical_state(trainer), trainer.mesh
        for portion in portions:
            trainer.accumulate(portion)
        trainer.reshard(NEXT, portions=portions)
        error = ""
        try:
            train(1)
        except PeerLost as lost:
            error = str(lost)
        trainer.world.leave(abort=True)
        trainer.rejoin(join(context, store, epoch=2, members=everyone))
        is_home = trainer.mesh == home
        is_same = same(before, logical_state(trainer))
        report = trainer.reshard(NEXT)
        train(1)
        train(2)
        trainer.world.leave()
    return {
        "error": np.array(error),
        "undone": np.array([is_home, is_same]),
        "redone": np.array(report.redone_updates),
        "updates": np.array(updates),
        "left": np.array([path.name for path in context.tmpfs.glob("epoch1-*")]),
    }


def used(context: RankContext) -> Results:
    """The certificate before and after what uses the state: a suspension, a portion, a save, and a reset."""
    found: dict[str, Any] = {}
    with started(context, HOME, late=True) as trainer:
        other = Layout(pp=2, dp=2)
        for name, layout in (("suspend", NEXT), ("accumulate", other), ("save", NEXT), ("reset", other)):
            trainer.reshard(layout)
            before = trainer.certificate
            match name:
                case "suspend":
                    trainer.prepare_suspension()
                    trainer.abort_suspension()
                case "accumulate":
                    trainer.accumulate(minibatch(0))
                case "save":
                    checkpoints.save_weights(trainer, context.tmpfs / "saved", str(context.rank))
                case _:
                    trainer.reset_optimizer()
            found[name] = np.array([before, trainer.certificate])
    return found
