"""GRPO on a Llama-like decoder in fp64, written from the formulas, without our code and without batches, padding or
shards.

The formulas: RMSNorm (arXiv 1910.07467), rotary embeddings on halves (arXiv 2104.09864), grouped queries (arXiv
2305.13245), SwiGLU (arXiv 2002.05202), GRPO (arXiv 2402.03300) with asymmetric clipping, truncated importance weights,
and Dr.GRPO's divisor (arXiv 2503.20783). Weights are logical tensors under Megatron's names. The fused projection is
[queries, key, value] per group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from services.actor.microbatch import TrainSample
from tidegate.model_config import ModelConfig

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loss:
    loss: float
    absolute_terms: float
    kl: float
    clip_fraction: float
    mismatch: dict[str, float]
    gradients: Weights


def response_log_probs(model: ModelConfig, weights: Weights, sample: TrainSample, temperature: float) -> torch.Tensor:
    tokens = torch.tensor(sample.prompt_tokens + sample.response_tokens)
    return next_log_probs(model, weights, tokens, temperature)[len(sample.prompt_tokens) - 1 :]


def next_log_probs(model: ModelConfig, weights: Weights, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """The log-probability of each token but the first, given the tokens before it."""
    logits = _logits(model, weights, tokens)[:-1] / temperature
    log_probs = logits - torch.log(torch.exp(logits).sum(-1, keepdim=True))
    return log_probs[torch.arange(len(tokens) - 1), tokens[1:]]


def grpo(
    model: ModelConfig,
    logical: Weights,
    samples: list[TrainSample],
    *,
    temperature: float,
    clip_low: float,
    clip_high: float,
    kl_coefficient: float,
    aggregation: str,
    old_log_probs: str,
    importance_cap: float | None,
    max_new_tokens: int,
) -> Loss:
    weights = {name: tensor.double().requires_grad_() for name, tensor in logical.items()}
    samples = [sample for sample in samples if not sample.masked]
    num_tokens = sum(len(sample.response_tokens) for sample in samples)
    loss, absolute, kl_sum, num_clipped = torch.zeros((), dtype=torch.float64), 0.0, 0.0, 0
    engine_ratios: list[float] = []
    for sample in samples:
        new = response_log_probs(model, weights, sample, temperature)
        engine = torch.tensor(sample.engine_log_probs, dtype=torch.float64)
        trainer = torch.tensor(sample.old_log_probs, dtype=torch.float64)
        old = trainer if old_log_probs == "trainer" else engine
        ratio = torch.exp(new - old)
        bounded = torch.clip(ratio, 1 - clip_low, 1 + clip_high)
        gain = torch.minimum(ratio * sample.advantage, bounded * sample.advantage)
        if importance_cap is not None:
            gain = gain * torch.clip(torch.exp(old - engine), max=importance_cap)
        reference_ratio = torch.exp(torch.tensor(sample.reference_log_probs, dtype=torch.float64) - new)
        k3 = reference_ratio - torch.log(reference_ratio) - 1
        terms = kl_coefficient * k3 - gain
        share = {
            "token-mean": 1 / num_tokens,
            "seq-mean-token-mean": 1 / len(samples) / len(terms),
            "seq-mean-token-sum": 1 / len(samples),
            "seq-mean-token-sum-norm": 1 / len(samples) / max_new_tokens,
        }[aggregation]
        loss = loss + share * terms.sum()
        absolute += share * float(terms.detach().abs().sum())
        kl_sum += float(k3.detach().sum())
        engine_ratios += torch.exp(trainer - engine).tolist()
        num_clipped += int((bounded * sample.advantage < ratio * sample.advantage).sum())
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return Loss(
        loss=float(loss.detach()),
        absolute_terms=absolute,
        kl=kl_sum / num_tokens,
        clip_fraction=num_clipped / num_tokens,
        mismatch=_mismatch(engine_ratios, importance_cap),
        gradients=dict(zip(weights, gradients, strict=True)),
    )


def _mismatch(ratios: list[float], importance_cap: float | None) -> dict[str, float]:
    logs = [math.log(ratio) for ratio in ratios]
    metrics = {
        "mismatch_mean": sum(map(abs, logs)) / len(logs),
        "mismatch_max": max(map(abs, logs)),
        "mismatch_kl": sum(ratio - log - 1 for ratio, log in zip(ratios, logs, strict=True)) / len(logs),
    }
    if importance_cap is not None:
        metrics["mismatch_truncated"] = sum(ratio > importance_cap for ratio in ratios) / len(ratios)
    return metrics


def _logits(model: ModelConfig, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[tokens]
    for layer in range(model.num_layers):
        own = {
            name.removeprefix(f"decoder.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        attended = _attention(model, own, _rms_norm(x, own["input_layernorm.weight"], model.rms_norm_eps))
        x = x + attended @ own["self_attention.linear_proj.weight"].T
        fused = _rms_norm(x, own["pre_mlp_layernorm.weight"], model.rms_norm_eps) @ own["mlp.linear_fc1.weight"].T
        gate, up = fused[:, : model.ffn_hidden_size], fused[:, model.ffn_hidden_size :]
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ own["mlp.linear_fc2.weight"].T
    x = _rms_norm(x, weights["decoder.final_layernorm.weight"], model.rms_norm_eps)
    return x @ weights.get("output_layer.weight", embedding).T


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _attention(model: ModelConfig, own: Weights, x: torch.Tensor) -> torch.Tensor:
    length, size = len(x), model.head_dim
    queries_per_group = model.num_heads // model.num_kv_heads
    fused = (x @ own["self_attention.linear_qkv.weight"].T).reshape(length, model.num_kv_heads, -1, size)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for group in range(model.num_kv_heads):
        key, value = _rotated(model, fused[:, group, queries_per_group]), fused[:, group, queries_per_group + 1]
        for query_index in range(queries_per_group):
            query = _rotated(model, fused[:, group, query_index])
            scores = (query @ key.T / size**0.5).masked_fill(future, -torch.inf)
            heads.append(torch.softmax(scores, -1) @ value)
    return torch.cat(heads, -1)


def _rotated(model: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    half = model.head_dim // 2
    frequencies = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    low, high = x[:, :half], x[:, half:]
    return torch.cat(
        [low * torch.cos(angles) - high * torch.sin(angles), high * torch.cos(angles) + low * torch.sin(angles)], -1
    )
