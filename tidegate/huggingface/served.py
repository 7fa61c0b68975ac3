"""Which SGLang generates, and which models it computes as Tidegate trains them; the others are refused. Pure."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from tidegate.huggingface.families import config_of
from tidegate.model_config import ModelConfig

INSTEAD = "set rollout.engine=embedded"

OLDEST = Version("0.5.23")
"""The first that the adapter was run with: it has sessions around weight updates, the versions of each token, and
/v1/loads. Some of them are younger than 0.5.20."""


def check_version(told: str) -> None:
    """ValueError unless an SGLang of this version can be driven: its endpoints change between versions."""
    try:
        version = Version(told)
    except InvalidVersion as error:
        raise ValueError(f"SGLang tells its version as {told!r}, which is none: install sglang=={OLDEST}") from error
    if version < OLDEST:
        raise ValueError(f"SGLang {told} is older than {OLDEST}, whose API this needs: install sglang=={OLDEST}")


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
