"""The rank processes of the reproducible mode's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from tests.integration.elastic.world_ranks import CPU, join, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic.minibatch import RankPlace
from tidegate.elastic.model.memory import OwnArena
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.megatron.batching import BatchLimits, Limits, ReplicaPlace, replica_batches
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.groups import megatron_groups, prepare_megatron
from tidegate.megatron.log_probs import token_log_probs
from tidegate.megatron.packing import TokenCap
from tidegate.megatron.reproducible import updater, wrapper
from tidegate.megatron.updates import Update, Updater
from tidegate.model_config import ModelConfig
from tidegate.types import Layout, Recompute

VOCAB, PADDED_VOCAB = 61, 64
TEMPERATURE = 0.7
NUM_SEQUENCES = 11
"""Eleven sequences make six micro-batches of two, so some replicas or shards run a filler for most numbers of them."""


def updates(
    context: RankContext,
    *,
    layout: dict[str, int],
    num_updates: int,
    num_logical_shards: int | None,
    tied: bool = False,
    bf16: bool = False,
    experts: bool = False,
    dropout: float = 0.0,
    threads: int = 1,
    rate: float = 1e-2,
    recompute: str = "none",
    max_tokens: int | None = None,
) -> Results:
    """Losses and norms of a run, and this rank's state after it. Elements that another rank holds are NaN."""
    torch.set_num_threads(threads)
    world = join(context, open_store(context), epoch=1, members=tuple(range(context.world_size)))
    provider = replace(_provider(tied=tied, bf16=bf16, experts=experts), recompute=Recompute(recompute))
    mesh = provider.mesh(Layout(**layout), tuple(range(context.world_size)))
    groups = megatron_groups(world, mesh)
    assert groups is not None
    prepare_megatron(groups, seed=0)
    skeleton = Skeleton(
        provider,
        mesh,
        context.rank,
        groups,
        _adam(bf16=bf16),
        device=CPU,
        arena=OwnArena(CPU),
        wrapper=wrapper(num_logical_shards),
    ).complete()
    provider.initialise(skeleton.chunks, mesh, context.rank, seed=3)
    skeleton.start_anew()
    get_model_config(skeleton.chunks[0]).hidden_dropout = dropout
    made = updater(skeleton.chunks, skeleton.optimizer, groups, num_sums=2, num_logical_shards=num_logical_shards)
    limits = BatchLimits(max_sequences=2) if max_tokens is None else TokenCap(max_tokens)
    place = RankPlace(mesh, context.rank, groups, CPU, num_logical_shards).of_replicas
    reports = [_update(made, groups, limits, place, seed=number, rate=rate) for number in range(num_updates)]
    world.leave()
    return _state(skeleton) | {
        "sums": np.array([report.sums for report in reports]),
        "grad_norm": np.array([report.grad_norm for report in reports]),
    }


def _update(
    made: Updater,
    groups: ProcessGroupCollection,
    limits: Limits,
    place: ReplicaPlace,
    *,
    seed: int,
    rate: float,
) -> Update:
    generator = np.random.default_rng(seed)
    sequences = [generator.integers(VOCAB, size=generator.integers(3, 16)).tolist() for _ in range(NUM_SEQUENCES)]
    weights = generator.standard_normal(NUM_SEQUENCES) / NUM_SEQUENCES
    batches = replica_batches(sequences, limits, place)

    def on_logits(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
        log_probs_BS = token_log_probs(logits_BQV, tokens_BS, vocab_size=VOCAB, temperature=TEMPERATURE, groups=groups)
        weight_BS = torch.zeros(tokens_BS.shape)
        for row, index in enumerate(batches[number].sequences):
            weight_BS[row, : len(sequences[index])] = float(weights[index]) / len(sequences[index])
        loss = -(log_probs_BS * weight_BS).sum()
        return loss, torch.stack([loss.detach(), (log_probs_BS * weight_BS).detach().square().sum()])

    return made.update(batches, on_logits, rate)


def _state(skeleton: Skeleton) -> Results:
    results: Results = {}
    ranges = skeleton.ranges()
    sizes = {name: tensor.numel() for (name, kind), tensor in skeleton.tensors().items() if kind == "weight"}
    for (name, kind), tensor in skeleton.tensors().items():
        if kind in ("weight", "step"):
            results[f"{kind}/{name}"] = tensor.detach().float().numpy().copy()
        else:
            whole = np.full(sizes[name], np.nan, dtype=np.float32)
            whole[slice(*ranges[name])] = tensor.detach().numpy()
            results[f"{kind}/{name}"] = whole
    return results


def _provider(*, tied: bool, bf16: bool, experts: bool) -> GptProvider:
    """A model whose buffers are cut between replicas in the middle of weights."""
    config = ModelConfig(
        num_layers=4,
        hidden_size=48,
        ffn_hidden_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        vocab_size=VOCAB,
        max_seq_len=16,
        tied_embeddings=tied,
        num_experts=4 if experts else None,
        experts_per_token=2 if experts else None,
    )
    return GptProvider(config, PADDED_VOCAB, dtype=torch.bfloat16 if bf16 else torch.float32)


def _adam(*, bf16: bool) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=0.05,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
    )
