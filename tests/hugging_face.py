"""Small checkpoints as transformers saves them: each family's real configurations, scaled down, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Llama 3.2": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": True,
    },
    "Llama 2": {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 8, "tie_word_embeddings": False},
    "Qwen2.5": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3": {
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    "Qwen3 MoE": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "Qwen3 MoE, shares of all experts": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
}
VOCAB_SIZE = 61
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_named(name: str, *, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB_SIZE) -> Any:
    """A model of `CONFIGS`. Every tensor is drawn, norms and biases too, with the same draw in each dtype."""
    said = dict(CONFIGS[name])
    config = AutoConfig.for_model(said.pop("model_type"), **_COMMON, vocab_size=vocab_size, **said)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1
            parameter.copy_(drawn * 0.3 + 1 if is_norm else drawn * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def save(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    vocab_size: int = VOCAB_SIZE,
) -> Any:
    """Saves a checkpoint and returns the saved model."""
    model = model_named(name, dtype=dtype, vocab_size=vocab_size)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
