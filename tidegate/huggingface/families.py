"""Converts a checkpoint's config.json to the model's shape and back, and refuses unsupported architectures and options.

Order: the architecture, then every option that changes the computation, then the numbers. An absent key has the value
that transformers assumes.

Invariants:
- An accepted model is computed as transformers computes it.
- An option that would be computed differently is refused by its key, with its value and the remedy.
- Each fault has its own message.

Dropout, caches and names of tokens do not change the computation and are ignored. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.model_config import Llama3Scaling, ModelConfig

RawConfig = Mapping[str, Any]


class CheckpointRefused(ValueError):
    """The folder is not a Hugging Face checkpoint, is damaged, or has an unsupported model."""


@dataclass(frozen=True, slots=True)
class Family:
    """The facts of a model type that are not in its config.json."""

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    head_dim: int | None = None
    """The head size where config.json names none. None: hidden_size / num_attention_heads."""


FAMILIES = (
    Family("llama", "LlamaForCausalLM"),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, experts=True),
)

_NEUTRAL: Mapping[str, tuple[object, str]] = {
    "quantization_config": (None, "quantised weights are not read; take the checkpoint in bfloat16 or float32"),
    "auto_map": (None, "a model's own code is not run; take a checkpoint of the plain architecture"),
    "hidden_act": ("silu", "the feed-forward layer is SwiGLU"),
    "attention_bias": (False, "only Qwen2's biases of queries, keys and values are supported"),
    "mlp_bias": (False, "the feed-forward layer has no biases"),
    "attention_dropout": (0.0, "dropout is not supported; set it to 0 to train the checkpoint without it"),
    "use_sliding_window": (False, "attention sees every earlier token; take a checkpoint without sliding windows"),
    "partial_rotary_factor": (1.0, "RoPE turns whole heads"),
    "decoder_sparse_step": (1, "either every layer has experts or none"),
    "mlp_only_layers": ([], "either every layer has experts or none"),
}
"""Options that change the computation: the one supported value, which an absent key means, and the reason."""

_LARGEST = sys.float_info.max


def model_of(raw: RawConfig) -> ModelConfig:
    """The model of a parsed config.json. max_seq_len is the largest that its positions allow. Raises
    CheckpointRefused.
    """
    family = _family(raw)
    _check_options(raw)
    heads, hidden = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    theta, scaling = _rope(raw)
    is_sparse = family.experts
    try:
        return ModelConfig(
            num_layers=_count(raw, "num_hidden_layers"),
            hidden_size=hidden,
            ffn_hidden_size=_count(raw, "moe_intermediate_size" if is_sparse else "intermediate_size"),
            num_heads=heads,
            num_kv_heads=_count(raw, "num_key_value_heads", heads if family.model_type == "llama" else None),
            head_dim=_count(raw, "head_dim", family.head_dim or hidden // heads),
            vocab_size=_count(raw, "vocab_size"),
            max_seq_len=_count(raw, "max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            tied_embeddings=_flag(raw, "tie_word_embeddings"),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            num_experts=_num_experts(raw) if is_sparse else None,
            experts_per_token=_count(raw, "num_experts_per_tok") if is_sparse else None,
            norm_topk_prob=_flag(raw, "norm_topk_prob") if is_sparse else True,
        )
    except CheckpointRefused:
        raise
    except ValueError as error:
        raise CheckpointRefused(f"config.json: {error}") from error


def config_of(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """A config.json for a model without a source checkpoint. Raises CheckpointRefused for a shape of no family."""
    family = next((known for known in FAMILIES if _fits(known, model)), None)
    if family is None:
        raise CheckpointRefused(
            f"no architecture of {', '.join(known.architecture for known in FAMILIES)} has a model with qkv_bias="
            f"{model.qkv_bias}, qk_norm={model.qk_norm} and num_experts={model.num_experts}: it cannot be exported"
        )
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "rope_theta": model.rope_theta,
        "rope_scaling": _raw_scaling(model.rope_scaling),
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    if family.experts:
        raw |= {
            "moe_intermediate_size": model.ffn_hidden_size,
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": model.norm_topk_prob,
        }
    return raw


def _fits(family: Family, model: ModelConfig) -> bool:
    features = (family.qkv_bias, family.qk_norm, family.experts)
    return features == (model.qkv_bias, model.qk_norm, model.num_experts is not None)


def _family(raw: RawConfig) -> Family:
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    for family in FAMILIES:
        if raw.get("model_type") == family.model_type and names == [family.architecture]:
            return family
    known = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)
    raise CheckpointRefused(
        f"config.json: architectures={architectures!r} of model_type={raw.get('model_type')!r} is not supported; "
        f"supported: {known}"
    )


def _check_options(raw: RawConfig) -> None:
    for key, (want, why) in _NEUTRAL.items():
        found = raw.get(key)
        if found is not None and found != want:
            raise CheckpointRefused(f"config.json: {key}={found!r} is not supported, only {want!r}: {why}")
    kinds = raw.get("layer_types") or []
    if others := sorted({str(kind) for kind in kinds} - {"full_attention"}):
        raise CheckpointRefused(
            f"config.json: layer_types has {', '.join(others)}, only full_attention is supported: attention sees every "
            "earlier token"
        )


def _rope(raw: RawConfig) -> tuple[float, Llama3Scaling | None]:
    """Reads `rope_parameters`, which transformers writes since version 5, or `rope_theta` and `rope_scaling`,
    as before.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointRefused(f"config.json: the parameters of RoPE are {rope!r}, not keys and values")
    theta = _number(rope if "rope_theta" in rope else raw, "rope_theta", 10_000.0)
    if _number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointRefused(
            f"config.json: partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported, only 1.0: "
            f"{_NEUTRAL['partial_rotary_factor'][1]}"
        )
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return theta, None
        case "llama3":
            return theta, _scaling(rope)
        case other:
            raise CheckpointRefused(
                f"config.json: RoPE of type {other!r} is not supported; supported: default, llama3. The checkpoint may "
                "work without the scaling up to its original length: remove the scaling from a copy"
            )


def _scaling(rope: RawConfig) -> Llama3Scaling:
    try:
        return Llama3Scaling(
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_seq_len=_count(rope, "original_max_position_embeddings"),
        )
    except CheckpointRefused:
        raise
    except ValueError as error:
        raise CheckpointRefused(f"config.json: {error}") from error


def _raw_scaling(scaling: Llama3Scaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def _num_experts(raw: RawConfig) -> int:
    """transformers writes `num_local_experts` since version 5."""
    return _count(raw, "num_experts" if "num_experts" in raw else "num_local_experts")


def _count(raw: RawConfig, key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointRefused(
            f"config.json: {key} is {value!r}, not a number of 1 or more: take the model's own file"
        )
    return value


def _number(raw: RawConfig, key: str, default: float | None = None) -> float:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointRefused(f"config.json: {key} is {value!r}, not a number: take the model's own file")
    if not -_LARGEST <= value <= _LARGEST:
        raise CheckpointRefused(f"config.json: {key} is {value!r:.60}, not a finite number: take the model's own file")
    return float(value)


def _flag(raw: RawConfig, key: str) -> bool:
    """False where the key is absent."""
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointRefused(f"config.json: {key} is {value!r}, neither true nor false: take the model's own file")
    return value
