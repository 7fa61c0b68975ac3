"""Which models SGLang computes as Tidegate trains them; the others are refused by what they have. Pure."""

from __future__ import annotations

from tidegate.huggingface.families import config_of
from tidegate.model_config import ModelConfig

INSTEAD = "set rollout.engine=embedded"


def check_served(model: ModelConfig) -> None:
    """ValueError, with what to do, for a model that SGLang is not given."""
    if model.num_experts is not None:
        raise ValueError(f"SGLang is given dense models here, and this one has {model.num_experts} experts: {INSTEAD}")
    config_of(model, dtype="float32")
    if model.qkv_bias and model.head_dim * model.num_heads != model.hidden_size:
        # On a CPU it does, whatever the config says; no checkpoint of Qwen2 differs.
        raise ValueError(
            f"SGLang takes hidden_size / num_heads = {model.hidden_size} / {model.num_heads} for the head_dim of a "
            f"Qwen2, and this one has head_dim={model.head_dim}: {INSTEAD}"
        )
