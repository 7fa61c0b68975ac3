"""The rank processes of the dist_checkpointing test: skeletons of two layouts, one filled, one loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

from tests.integration.elastic.dist_checkpoint import Trained, held_state, load, save
from tests.integration.elastic.world_ranks import CPU, join, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic.epoch.world import World
from tidegate.elastic.model.memory import OwnArena
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.groups import megatron_groups
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

CONFIG = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=125,
    max_seq_len=16,
    tied_embeddings=True,
)


def provider(dtype: str) -> GptProvider:
    return GptProvider(CONFIG, padded_vocab=128, dtype=getattr(torch, dtype))


def through_a_checkpoint(
    context: RankContext, *, source: Any, target: Any, dtype: str, folder: str, num_steps: int
) -> Results:
    """`held_state` in both layouts under `source:` and `target:`. Each layout is (its sizes, ranks)."""
    world = join(context, open_store(context), epoch=1, members=tuple(range(context.world_size)))
    before = _skeleton(world, source, dtype)
    after = _skeleton(world, target, dtype)
    if before is not None:
        _fill(before, world.me, num_steps, dtype)
    save(None if before is None else _trained(before), Path(folder))
    load(None if after is None else _trained(after), Path(folder))
    found: Results = {}
    for label, skeleton in (("source:", before), ("target:", after)):
        if skeleton is not None:
            named = provider(dtype).local_parameters(skeleton.chunks, skeleton.mesh, world.me)
            held = held_state(_trained(skeleton), named)
            found |= {label + key: array for key, array in held.items()}
    world.barrier(world.membership.members)
    world.leave()
    return found


def _skeleton(world: World, layout: Any, dtype: str) -> Skeleton | None:
    sizes, ranks = layout
    model = provider(dtype)
    mesh = model.mesh(Layout(**sizes), tuple(ranks))
    groups = megatron_groups(world, mesh)
    if groups is None:
        return None
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        params_dtype=getattr(torch, dtype),
        bf16=dtype == "bfloat16",
        use_distributed_optimizer=True,
    )
    return Skeleton(model, mesh, world.me, groups, config, device=CPU, arena=OwnArena(CPU)).complete()


def _fill(skeleton: Skeleton, me: int, num_steps: int, dtype: str) -> None:
    """The provider sets the weights. Optimizer state is derived from the main parameters, so that replicas agree."""
    provider(dtype).initialise(skeleton.chunks, skeleton.mesh, me, seed=1)
    skeleton.start_anew()
    tensors = skeleton.tensors()
    for name, reach in skeleton.ranges().items():
        weights = tensors[name, StateKind.WEIGHT][slice(*reach)].float()
        if (name, StateKind.MAIN_PARAM) in tensors:
            tensors[name, StateKind.MAIN_PARAM].copy_(weights * 1.001)
        tensors[name, StateKind.EXP_AVG].copy_(weights * 2.0)
        tensors[name, StateKind.EXP_AVG_SQ].copy_(weights * weights)
        tensors[name, StateKind.STEP].fill_(num_steps)


def _trained(skeleton: Skeleton) -> Trained:
    return Trained(skeleton.chunks, skeleton.optimizer, skeleton.groups)
