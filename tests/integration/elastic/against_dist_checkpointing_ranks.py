"""The rank processes of the test against dist_checkpointing: the same state once resharded, once saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.elastic.dist_checkpoint import Trained, held_state, load, save
from tests.integration.elastic.trainer_ranks import LEARNING_RATE, holds_state, minibatch, started
from tests.ranks import RankContext, Results
from tidegate.elastic.model.memory import OwnArena
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.types import Layout

NUM_UPDATES = 2


def resharded_and_loaded(
    context: RankContext, *, source: dict[str, Any], target: dict[str, Any], folder: str, **options: Any
) -> Results:
    """The tensors, padding included, whose bits differ in a loaded model and optimizer; and the number of tensors."""
    with started(context, Layout(**source["layout"]), source.get("ranks"), **options) as trainer:
        for update in range(NUM_UPDATES):
            trainer.train_minibatch(minibatch(update), LEARNING_RATE)
        save(_trained(trainer.state.skeleton) if holds_state(trainer) else None, Path(folder))
        trainer.reshard(Layout(**target["layout"]), ranks=target.get("ranks"))
        skeleton = _like(trainer) if holds_state(trainer) else None
        load(None if skeleton is None else _trained(skeleton), Path(folder))
        got: Results = {}
        want: Results = {}
        if skeleton is not None:
            got, want = _held(trainer, trainer.state.skeleton), _held(trainer, skeleton)
        assert got.keys() == want.keys()
        differing = [key for key in got if not np.array_equal(got[key], want[key], equal_nan=True)]
        steps = {float(tensor[0]) for key, tensor in got.items() if key.startswith("step/")}
        return {
            "differing": np.array(differing, dtype=str),
            "num_tensors": np.array(len(got)),
            "steps": np.array(sorted(steps)),
        }


def _like(trainer: ElasticTrainer) -> Skeleton:
    """Another model and optimizer in the trainer's layout, with undefined content."""
    skeleton, device = trainer.state.skeleton, trainer.world.device
    return Skeleton(
        trainer.provider,
        skeleton.mesh,
        trainer.world.me,
        skeleton.groups,
        trainer.optimizer_config,
        device=device,
        arena=OwnArena(device),
    ).complete()


def _trained(skeleton: Skeleton) -> Trained:
    return Trained(skeleton.chunks, skeleton.optimizer, skeleton.groups)


def _held(trainer: ElasticTrainer, skeleton: Skeleton) -> Results:
    named = trainer.provider.local_parameters(skeleton.chunks, skeleton.mesh, trainer.world.me)
    return held_state(_trained(skeleton), named)
