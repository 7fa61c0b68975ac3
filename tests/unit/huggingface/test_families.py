"""config.json becomes the model's shape. Unsupported options are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from tests.hugging_face import CONFIGS, LLAMA3_SCALING
from tidegate.huggingface.families import CheckpointRefused, config_of, model_of
from tidegate.model_config import Llama3Scaling, ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
EXPERTS = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another architecture": (
        LLAMA,
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        r"architectures=\['MistralForCausalLM'\] of model_type='mistral' is not supported; supported: LlamaForCausalLM",
    ),
    "a head of another task": (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "is not supported"),
    "no architecture": (LLAMA, {"architectures": None}, "architectures=None"),
    "quantised weights": (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*bfloat16"),
    "its own code": (LLAMA, {"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map=.*own code is not run"),
    "another activation": (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
    "biases of attention": (LLAMA, {"attention_bias": True}, "attention_bias=True is not supported"),
    "biases of the feed-forward layer": (LLAMA, {"mlp_bias": True}, "mlp_bias=True is not supported"),
    "dropout": (QWEN3, {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported, only 0.0"),
    "a sliding window": (QWEN2, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    "layers with a sliding window": (
        QWEN3,
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has sliding_attention, only full_attention",
    ),
    "RoPE of a part": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    "RoPE stretched otherwise": (
        QWEN2,
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "RoPE of type 'yarn' is not supported; supported: default, llama3",
    ),
    "a scaling without its numbers": (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "factor is None, not a number"),
    "a scaling that makes no sense": (
        LLAMA,
        {"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 0.5}},
        "RoPE scaling .* makes no frequencies",
    ),
    "dense layers among those with experts": (EXPERTS, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    "experts in some layers": (EXPERTS, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    "one expert of weight 1": (EXPERTS, {"num_experts_per_tok": 1}, "experts_per_token=1 with norm_topk_prob"),
    "a number that is none": (LLAMA, {"hidden_size": "2048"}, "hidden_size is '2048', not a number of 1 or more"),
    "a number that is missing": (QWEN2, {"num_key_value_heads": None}, "num_key_value_heads is None"),
    "heads that do not divide": (LLAMA, {"num_key_value_heads": 5}, "num_heads=32 does not divide by num_kv_heads=5"),
}


@pytest.mark.parametrize(("base", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_option_is_refused_by_name(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    model_of(base)
    with pytest.raises(CheckpointRefused, match=message):
        model_of(base | change)


def test_a_config_written_before_transformers_5_is_read() -> None:
    scaling = LLAMA3_SCALING | {"original_max_position_embeddings": 8192}
    assert model_of(LLAMA | {"rope_scaling": scaling}) == ModelConfig(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_seq_len=131072,
        rope_theta=500_000.0,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        rms_norm_eps=1e-5,
        tied_embeddings=True,
    )


def test_a_config_that_transformers_writes_now_gives_the_same_model() -> None:
    raw = LLAMA | {"rope_scaling": LLAMA3_SCALING}
    written = AutoConfig.for_model(**raw).to_dict()
    assert "rope_theta" not in written
    assert model_of(written | {"architectures": raw["architectures"]}) == model_of(raw)


def test_the_special_options_of_each_family_are_read() -> None:
    assert model_of(QWEN2).qkv_bias
    assert model_of(QWEN3).qk_norm
    assert model_of(QWEN3).head_dim == 128
    sparse = model_of(EXPERTS)
    assert (sparse.num_experts, sparse.experts_per_token, sparse.ffn_hidden_size) == (128, 8, 768)
    assert model_of(QWEN2 | {"sliding_window": 4096, "use_sliding_window": False}) == model_of(QWEN2)


@pytest.mark.parametrize("raw", [LLAMA, QWEN2, QWEN3, EXPERTS], ids=["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_model_without_a_checkpoint_gets_a_config_that_gives_the_same_model(raw: dict[str, Any]) -> None:
    model = model_of(raw | {"rope_scaling": LLAMA3_SCALING})
    written = config_of(model, dtype="float32")
    assert model_of(written) == model
    assert model_of(AutoConfig.for_model(**written).to_dict() | {"architectures": raw["architectures"]}) == model


def test_a_model_of_no_family_has_no_config() -> None:
    odd = ModelConfig(2, 64, 96, 4, 2, 16, 61, 64, qkv_bias=True, qk_norm=True)
    with pytest.raises(CheckpointRefused, match="has a model with qkv_bias=True, qk_norm=True"):
        config_of(odd, dtype="float32")


def test_every_family_is_compared_with_transformers_in_tests() -> None:
    assert {str(config["model_type"]) for config in CONFIGS.values()} == {"llama", "qwen2", "qwen3", "qwen3_moe"}
