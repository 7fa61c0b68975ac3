"""Which SGLang versions can generate, and which models SGLang computes as Tidegate trains them. Others are
refused. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from tidegate.huggingface.families import config_of
from tidegate.model_config import ModelConfig

INSTEAD = "set rollout.engine=embedded"

OLDEST = Version("0.5.23")
"""The first version that the adapter ran with.

It has sessions around weight updates, the versions of each token, and /v1/loads. Some of them are newer than 0.5.20.
"""

OptionValue = bool | int | float | str

OWN_OPTIONS = frozenset(
    {
        "api-key",
        "base-gpu-id",
        "config",
        "device",
        "disable-radix-cache",
        "dtype",
        "enable-deterministic-inference",
        "enable-memory-saver",
        "host",
        "load-format",
        "load-snapshot-publish-interval",
        "max-running-requests",
        "model-path",
        "port",
        "skip-server-warmup",
        "skip-tokenizer-init",
        "sleep-on-idle",
    }
)
"""The options of SGLang's server on which the adapter relies. Nobody else may set them."""


def check_options(names: Iterable[str]) -> None:
    """Raises ValueError for an option that is not written as SGLang's own, or that Tidegate sets."""
    for name in names:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise ValueError(f"SGLang has no option {name!r}: write it in lower case with dashes, as attention-backend")
        if name in OWN_OPTIONS:
            raise ValueError(f"Tidegate sets SGLang's option {name} itself: leave it out")


def check_version(text: str) -> None:
    """Raises ValueError unless this SGLang version is supported: its endpoints change between versions."""
    try:
        version = Version(text)
    except InvalidVersion as error:
        raise ValueError(f"SGLang's version {text!r} is not a version number: install sglang=={OLDEST}") from error
    if version < OLDEST:
        raise ValueError(f"SGLang {text} is older than {OLDEST}, whose API this needs: install sglang=={OLDEST}")


def check_servable(model: ModelConfig) -> None:
    """Raises ValueError, with the remedy, for a model that SGLang does not get."""
    if model.num_experts is not None:
        raise ValueError(
            f"SGLang supports only dense models here, and this one has {model.num_experts} experts: {INSTEAD}"
        )
    config_of(model, dtype="float32")
    if model.qkv_bias and model.head_dim * model.num_heads != model.hidden_size:
        # On a CPU SGLang assumes this head_dim, whatever the config says. No checkpoint of Qwen2 has another one.
        raise ValueError(
            f"SGLang assumes head_dim = hidden_size / num_heads = {model.hidden_size} / {model.num_heads} for a "
            f"Qwen2, and this one has head_dim={model.head_dim}: {INSTEAD}"
        )
