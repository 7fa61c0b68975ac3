"""The rank processes of the checkpoint tests: its logits in one layout after another, and a trainer's saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.actor.worker import rank_file
from tests.integration.elastic.world_ranks import open_store
from tests.integration.megatron import small_job
from tests.integration.megatron.actor_trainer_ranks import trainer
from tests.ranks import RankContext, Results
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.world import Membership, World
from tidegate.huggingface.checkpoint import open_checkpoint
from tidegate.huggingface.checkpoint_weights import CheckpointWeights
from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.groups import megatron_groups, prepare_megatron
from tidegate.megatron.schedule import run_micro_batches
from tidegate.types import Layout

CPU = torch.device("cpu")
PADDED_VOCAB = 64


def logits(context: RankContext, *, cases: dict[str, dict[str, Any]]) -> Results:
    """By case: this rank's part of the logits, where it has one."""
    store = open_store(context, timeout_s=context.timeout_s)
    everyone = Membership(0, tuple(range(context.world_size)))
    world = World.join(everyone, me=context.rank, store=store, device=CPU, timeout_s=context.timeout_s)
    results: Results = {}
    for name, case in cases.items():
        for part in _logits(world, context.rank, Path(case["folder"]), Layout(**case["layout"]), case["tokens"]):
            results[name] = part
    world.barrier(everyone.members)
    world.leave()
    return results


def saved(context: RankContext, *, checkpoint: str, layout: dict[str, int], folder: str) -> Results:
    """A trainer that starts from the checkpoint saves its state as `untrained`, and after an update as `trained`."""
    opened = open_checkpoint(Path(checkpoint))
    settings = replace(small_job.trainer_settings(), model=opened.model, padded_vocab=PADDED_VOCAB)
    with trainer(context, layout, settings, weights=CheckpointWeights(opened)) as actor:
        checkpoints.save(actor.elastic, Path(folder) / "untrained", rank_file(context.rank))
        report = actor.train_minibatch(small_job.recorded_samples(), 1e-3)
        checkpoints.save(actor.elastic, Path(folder) / "trained", rank_file(context.rank))
    return {"loss": np.array(report.loss), "committed": np.array(report.committed)}


def _logits(world: World, me: int, folder: Path, layout: Layout, tokens: list[list[int]]) -> list[Any]:
    checkpoint = open_checkpoint(folder)
    provider = GptProvider(checkpoint.model, PADDED_VOCAB, weights=CheckpointWeights(checkpoint))
    mesh = provider.mesh(layout, tuple(range(layout.num_ranks)))
    groups = megatron_groups(world, mesh)
    if groups is None:
        return []
    prepare_megatron(groups, seed=0)
    chunks = provider.build(mesh, me, groups, device=CPU)
    provider.initialise(chunks, mesh, me, seed=0)

    def keep(number: int, tokens_BS: torch.Tensor, logits_BSV: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return logits_BSV, logits_BSV.float().numpy().copy()

    batch = TokenBatch(tuple(range(len(tokens))), np.array(tokens))
    with torch.no_grad():
        return run_micro_batches(
            [chunk.eval() for chunk in chunks], [batch], keep, groups=groups, device=CPU, forward_only=True
        )
