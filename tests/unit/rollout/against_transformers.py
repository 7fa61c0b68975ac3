"""Hugging Face's Llama with the tiny models' weights, and the check of the greedy tokens against its `generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.rollout.engine import SamplingParams
from tests.unit.rollout.tiny_models import TINY, engine_of, random_weights, request_of, run
from tidegate.elastic.plan.gpt import EMBEDDING, FINAL_NORM, OUTPUT, layer_name
from tidegate.model_config import ModelConfig

SHAPES = {
    "untied, two KV groups": TINY,
    "tied, one KV group": replace(TINY, tied_embeddings=True, num_kv_heads=1),
    "as many KV heads as heads, another RoPE base and epsilon": replace(
        TINY, num_kv_heads=4, rope_theta=500_000.0, rms_norm_eps=1e-3
    ),
}
PROMPTS = {"one token": [9], "short": [5, 17, 3, 3, 41], "over a block of keys": [(7 * i) % 61 for i in range(90)]}


def llama(config: ModelConfig) -> LlamaForCausalLM:
    """The same random weights as those of `engine_of(config)`, unfused by hand."""
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_seq_len,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation="eager",
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    model.load_state_dict(hugging_face_tensors(config))
    return model


def hugging_face_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    ours = dict(random_weights(config))
    embedding = ours[EMBEDDING][: config.vocab_size]
    theirs = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ours[FINAL_NORM],
        "lm_head.weight": embedding if config.tied_embeddings else ours[OUTPUT][: config.vocab_size],
    }
    queries = config.num_heads // config.num_kv_heads
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        fused = ours[layer_name(layer, "self_attention.linear_qkv.weight")]
        grouped = fused.view(config.num_kv_heads, queries + 2, config.head_dim, config.hidden_size)
        theirs[f"{prefix}.self_attn.q_proj.weight"] = grouped[:, :queries].flatten(0, 2)
        theirs[f"{prefix}.self_attn.k_proj.weight"] = grouped[:, queries].flatten(0, 1)
        theirs[f"{prefix}.self_attn.v_proj.weight"] = grouped[:, queries + 1].flatten(0, 1)
        theirs[f"{prefix}.self_attn.o_proj.weight"] = ours[layer_name(layer, "self_attention.linear_proj.weight")]
        gate, up = ours[layer_name(layer, "mlp.linear_fc1.weight")].chunk(2)
        theirs[f"{prefix}.mlp.gate_proj.weight"], theirs[f"{prefix}.mlp.up_proj.weight"] = gate, up
        theirs[f"{prefix}.mlp.down_proj.weight"] = ours[layer_name(layer, "mlp.linear_fc2.weight")]
        theirs[f"{prefix}.input_layernorm.weight"] = ours[layer_name(layer, "input_layernorm.weight")]
        theirs[f"{prefix}.post_attention_layernorm.weight"] = ours[layer_name(layer, "pre_mlp_layernorm.weight")]
    return theirs


def check_greedy_tokens(config: ModelConfig, **options: Any) -> None:
    """`options` are those of the engine. transformers computes on the CPU."""
    model = llama(config)
    sampling = SamplingParams(max_new_tokens=60, temperature=0)
    requests = [request_of(name, prompt=prompt, sampling=sampling) for name, prompt in PROMPTS.items()]
    finished = run(engine_of(config, **options), *requests)
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False, pad_token_id=0
        )
        want = tuple(output[0, len(prompt) :].tolist())
        assert finished[name].response.tokens == want, name
