"""A small model, its settings and recorded samples from fixed seeds: the same in every test and on every rank."""

from __future__ import annotations

import math

import numpy as np

from services.actor.grpo import Aggregation, GrpoSettings, OldLogProbs, group_advantages
from services.actor.microbatch import TrainSample
from services.actor.settings import OptimizerSettings, TrainerSettings
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.family import padded_vocab_size
from tidegate.megatron.packing import TokenCap
from tidegate.model_config import ModelConfig
from tidegate.types import Precision

GROUP_SIZE = 4
TEMPERATURE = 0.7
NO_CLIPPING = 1e9
MAX_NEW_TOKENS = 24
"""Longer than any of the recorded responses."""


def small_model(*, tied: bool = False, experts: bool = False) -> ModelConfig:
    """61 tokens do not divide by 2 or 4, so the vocabulary is padded. With experts it has layers for virtual stages."""
    return ModelConfig(
        num_layers=4 if experts else 2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=61,
        max_seq_len=64,
        tied_embeddings=tied,
        num_experts=4 if experts else None,
        experts_per_token=2 if experts else None,
    )


def trainer_settings(
    *,
    tied: bool = False,
    experts: bool = False,
    grpo: GrpoSettings | None = None,
    clip_grad: float = 1.0,
    seed: int = 0,
    precision: str = "fp32",
    max_tokens: int | None = None,
) -> TrainerSettings:
    """`max_tokens` is the token cap of a micro-batch. Without it a micro-batch has three sequences."""
    model = small_model(tied=tied, experts=experts)
    three = BatchLimits(max_sequences=3, pad_multiple=4)
    return TrainerSettings(
        model=model,
        padded_vocab=padded_vocab_size(model, (1, 2, 4)),
        seed=seed,
        temperature=TEMPERATURE,
        limits=three if max_tokens is None else TokenCap.of_model(model, max_tokens),
        grpo=grpo or GrpoSettings(kl_coefficient=0.05),
        optimizer=OptimizerSettings(clip_grad=clip_grad),
        precision=Precision(precision),
    )


def grpo_settings(
    aggregation: str = "token-mean", old_log_probs: str = "trainer", importance_cap: float | None = None
) -> GrpoSettings:
    return GrpoSettings(
        clip_low=0.1,
        clip_high=0.25,
        kl_coefficient=0.05,
        aggregation=Aggregation(aggregation),
        old_log_probs=OldLogProbs(old_log_probs),
        importance_cap=importance_cap,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def recorded_samples(*, num_groups: int = 3, seed: int = 7) -> list[TrainSample]:
    """Groups of unequal lengths, off-policy enough to be clipped. The last group has equal rewards; one sample
    is masked.
    """
    generator = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for group in range(num_groups):
        rewards = generator.integers(0, 3, GROUP_SIZE).astype(float)
        if group == num_groups - 1:
            rewards[:] = 1.0
        prompt = _tokens(generator, int(generator.integers(3, 8)))
        for advantage in group_advantages(list(rewards)):
            length = int(generator.integers(2, 20))
            old = -math.log(61) + 0.3 * generator.standard_normal(length)
            samples.append(
                TrainSample(
                    prompt_tokens=prompt,
                    response_tokens=_tokens(generator, length),
                    advantage=float(advantage),
                    old_log_probs=_floats(old),
                    reference_log_probs=_floats(old + 0.1 * generator.standard_normal(length)),
                    engine_log_probs=_floats(old + 0.05 * generator.standard_normal(length)),
                    masked=len(samples) == 1,
                )
            )
    return samples


def _tokens(generator: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in generator.integers(0, 61, count))


def _floats(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, ...]:
    return tuple(float(value) for value in values.astype(np.float32))
