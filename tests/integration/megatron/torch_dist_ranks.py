"""The ranks of a layout that save a model with Megatron's own dist_checkpointing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.integration.elastic.dist_checkpoint import Trained, save
from tests.integration.megatron import small_job
from tests.integration.megatron.actor_trainer_ranks import trainer
from tests.ranks import RankContext, Results
from tidegate.model_config import ModelConfig

PADDED_VOCAB = 128
DENSE = ModelConfig(2, 32, 48, 8, 4, 8, 61, 64, tied_embeddings=True, qkv_bias=True, qk_norm=True)
EXPERTS = ModelConfig(2, 32, 48, 8, 4, 8, 61, 64, num_experts=4, experts_per_token=2)
MODELS = {"dense": DENSE, "experts": EXPERTS}


def saved(context: RankContext, *, model: str, layout: dict[str, int], folder: str) -> Results:
    settings = replace(small_job.trainer_settings(), model=MODELS[model], padded_vocab=PADDED_VOCAB)
    with trainer(context, layout, settings) as actor:
        skeleton = actor.elastic.state.skeleton
        save(Trained(skeleton.chunks, skeleton.optimizer, skeleton.groups), Path(folder))
    return {}
