"""The settings of a trainer: pure values, the same on every rank of the actor."""

from __future__ import annotations

from dataclasses import dataclass

from services.actor.grpo import GrpoSettings
from tidegate.config.sections.job import ActorSection
from tidegate.elastic.settings import CopyTo
from tidegate.megatron.batching import BatchLimits, Limits
from tidegate.megatron.packing import Oversize, Packing, TokenCap
from tidegate.model_config import ModelConfig
from tidegate.types import Precision, Recompute


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The settings of AdamW and of gradient clipping."""

    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    model: ModelConfig
    padded_vocab: int
    seed: int
    temperature: float
    limits: Limits
    grpo: GrpoSettings
    optimizer: OptimizerSettings
    copies: CopyTo = CopyTo.NOWHERE
    num_logical_shards: int | None = None
    """A power of two that every dp divides. Updates are then bitwise the same for every dp and pp. None is faster."""
    precision: Precision = Precision.FP32
    recompute: Recompute = Recompute.NONE


def limits_of(actor: ActorSection, model: ModelConfig) -> Limits:
    """The limits of the actor's micro-batches."""
    if actor.max_tokens_per_microbatch is None:
        return BatchLimits(max_sequences=actor.micro_batch_size)
    return TokenCap.of_model(
        model, actor.max_tokens_per_microbatch, Oversize(actor.oversize_samples), Packing(actor.packing)
    )
