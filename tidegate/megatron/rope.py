"""The frequencies of the rotary embedding. Trainer, inference and embedded engine use the same."""

from __future__ import annotations

import math

import torch

from tidegate.model_config import Llama3Scaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] in fp32 on the CPU: radians per position, for each pair of a head's elements."""
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _scaled(frequencies, config.rope_scaling)


def _scaled(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    # For each frequency, the number of waves in the length of the original training.
    waves = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
