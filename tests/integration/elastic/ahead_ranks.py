"""The rank processes of the tests of layouts that are built ahead."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule

from tests.integration.elastic.leak_ranks import num_with_pages
from tests.integration.elastic.trainer_ranks import LEARNING_RATE, logical_state, minibatch, started
from tests.integration.elastic.world_ranks import join, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic.epoch.world import PeerLost
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.types import Layout


def walk(context: RankContext, *, places: list[dict[str, Any]], ahead: bool, **options: Any) -> Results:
    """Train an update in each place. `ahead`: each place is built while the job trains in the one before.

    `was_built`: of each switch. `pages`: the layouts whose memory this member has, before and after each.
    """
    updates: list[tuple[float, float]] = []
    was_built, pages = [], []

    def train(trainer: ElasticTrainer) -> None:
        update = trainer.train_minibatch(minibatch(len(updates)), LEARNING_RATE)
        updates.append((update.sums[0], update.grad_norm) if update else (np.nan, np.nan))

    first, *others = places
    with started(context, Layout(**first["layout"]), first.get("ranks"), **options) as trainer:
        train(trainer)
        for place in others:
            mesh = trainer.mesh_of(Layout(**place["layout"]), place.get("ranks"))
            if ahead:
                trainer.build_ahead(mesh, keeps_memory=True)
            before = num_with_pages(context)
            report = trainer.reshard(Layout(**place["layout"]), ranks=place.get("ranks"))
            pages.append((before, num_with_pages(context)))
            was_built.append(report.was_built)
            train(trainer)
        final = logical_state(trainer)
    figures = {
        "updates": np.array(updates),
        "was_built": np.array(was_built),
        "pages": np.array(pages),
    }
    return figures | {f"final/{key}": value for key, value in final.items()}


@dataclass(frozen=True)
class Dying(GptProvider):
    """A model whose building may end the process."""

    die: Callable[[], None] = lambda: None

    def build(
        self, mesh: Mesh, me: int, groups: ProcessGroupCollection, *, device: torch.device
    ) -> list[MegatronModule]:
        self.die()
        return super().build(mesh, me, groups, device=device)


def a_standby_dies(
    context: RankContext, *, layout: dict[str, int], victim: int, survivors: list[int], **options: Any
) -> Results:
    """The victim, on standby, dies as it builds a layout ahead. The others train on in the first layout, and then in
    another epoch in `layout` on the survivors.

    `was_built`: of the switch in the second epoch.
    """
    updates: list[tuple[float, float]] = []
    num_lost = 0

    def die() -> None:
        if context.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(used: GptProvider) -> GptProvider:
        return Dying(used.config, used.padded_vocab, dtype=used.dtype, die=die)

    def train(trainer: ElasticTrainer) -> None:
        update = trainer.train_minibatch(minibatch(len(updates)), LEARNING_RATE)
        updates.append((update.sums[0], update.grad_norm) if update else (np.nan, np.nan))

    target = Layout(**layout)
    store = open_store(context)
    with started(context, Layout(dp=2), (0, 1), change=dying, ends_world=False, store=store, **options) as trainer:
        first = trainer.world
        train(trainer)
        trainer.build_ahead(trainer.mesh_of(target, survivors), keeps_memory=True)
        try:
            trainer.build_ahead(trainer.mesh_of(Layout(dp=4)), keeps_memory=True)
        except PeerLost:
            num_lost += 1
        train(trainer)
        first.leave(abort=True)
        members = tuple(rank for rank in range(context.world_size) if rank != victim)
        world = join(context, store, epoch=2, members=members)
        trainer.rejoin(world)
        report = trainer.reshard(target, ranks=survivors)
        train(trainer)
        final = logical_state(trainer)
        world.leave()
    figures = {"updates": np.array(updates), "lost": np.array(num_lost), "was_built": np.array(report.was_built)}
    return figures | {f"final/{key}": value for key, value in final.items()}
