"""What the rank processes of these tests run; each returns a dict of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from services.actor.settings import TrainerSettings
from services.actor.trainer import MegatronTrainer
from tests.integration.megatron import recorded
from tests.ranks import RankContext, Results
from tidegate.megatron.parallel import ParallelRanks, Rendezvous, parallel
from tidegate.types import Layout

CPU = torch.device("cpu")


@contextmanager
def world(context: RankContext, layout: dict[str, int]) -> Iterator[ParallelRanks]:
    rendezvous = Rendezvous(
        rank=context.rank,
        world_size=context.world_size,
        port=context.port,
        timeout_s=context.timeout_s,
        listen_fd=context.listen_fd,
    )
    with parallel(rendezvous, Layout(**layout), device=CPU, seed=0) as ranks:
        yield ranks


@contextmanager
def trainer(context: RankContext, layout: dict[str, int], settings: TrainerSettings) -> Iterator[MegatronTrainer]:
    with world(context, layout) as ranks:
        yield MegatronTrainer(settings, ranks, device=CPU)


def one_update(
    context: RankContext, *, layout: dict[str, int], grpo: dict[str, Any], tied: bool = False, rate: float = 1e-3
) -> Results:
    """Initial parameters, and the loss, gradients and metrics of one update, by logical name with their places."""
    settings = recorded.trainer_settings(tied=tied, grpo=recorded.grpo_settings(**grpo), clip_grad=recorded.NO_CLIPPING)
    with trainer(context, layout, settings) as actor:
        results: Results = {}
        for parameter in actor.parameters():
            shard, name = parameter.shard, parameter.shard.name
            results[f"param/{name}"] = parameter.tensor.detach().numpy().copy()
            results[f"dim/{name}"] = np.array(shard.dim)
            results[f"shape/{name}"] = np.array(shard.logical_shape)
            results[f"pieces/{name}"] = np.array([(p.local, p.logical, p.size) for p in shard.pieces]).reshape(-1, 3)
        report = actor.train_minibatch(recorded.recorded_samples(), rate)
        for name, gradient in actor.gradients().items():
            results[f"grad/{name}"] = gradient.numpy()
        results["committed"] = np.array(report.committed)
        results["loss"], results["grad_norm"] = np.array(report.loss), np.array(report.grad_norm)
        return results | {f"metric/{name}": np.array(value) for name, value in report.metrics.items()}


def updates(
    context: RankContext, *, layout: dict[str, int], num_updates: int, tied: bool = False, seed: int = 0
) -> Results:
    """Losses and norms of a run over recorded minibatches, and the final state."""
    with trainer(context, layout, recorded.trainer_settings(tied=tied, seed=seed)) as actor:
        reports = [actor.train_minibatch(recorded.recorded_samples(seed=update), 1e-3) for update in range(num_updates)]
        results = {f"state/{name}": tensor.numpy() for name, tensor in actor.state_tensors().items()}
        results["loss"] = np.array([report.loss for report in reports])
        results["absolute_terms"] = np.array([report.metrics["absolute_terms"] for report in reports])
        return results | {"grad_norm": np.array([report.grad_norm for report in reports])}
