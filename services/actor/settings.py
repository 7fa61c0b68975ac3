"""The settings of a trainer: pure values, the same on every rank of the actor."""

from __future__ import annotations

from dataclasses import dataclass

from services.actor.grpo import Aggregation, GrpoSettings, OldLogProbs
from tidegate.config.sections.job import ActorSection
from tidegate.elastic.settings import CopyTo
from tidegate.job import Job
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


def settings_of(job: Job) -> TrainerSettings:
    """The settings that a job's config says."""
    algorithm, actor = job.config.algorithm, job.config.actor
    return TrainerSettings(
        model=job.model,
        padded_vocab=job.padded_vocab,
        seed=job.config.seed,
        temperature=algorithm.temperature,
        limits=limits_of(actor, job.model),
        grpo=GrpoSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coefficient=algorithm.kl_coefficient,
            aggregation=Aggregation(algorithm.loss_aggregation),
            old_log_probs=OldLogProbs(algorithm.old_logprobs),
            importance_cap=algorithm.importance_cap,
            max_new_tokens=algorithm.max_new_tokens,
        ),
        copies=CopyTo(actor.copies),
        num_logical_shards=actor.num_logical_shards,
        precision=actor.precision,
        recompute=actor.recompute,
        optimizer=OptimizerSettings(
            weight_decay=actor.weight_decay,
            adam_beta1=actor.adam_beta1,
            adam_beta2=actor.adam_beta2,
            adam_epsilon=actor.adam_epsilon,
            clip_grad=actor.clip_grad,
        ),
    )
