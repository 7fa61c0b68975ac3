"""The weights of an embedded engine: full logical Megatron tensors in fp32.

Tensors are kept as they came, so that their checksums can be compared. Tensors in bf16 are widened to fp32, which
changes no value. Fused tensors stay fused: `linear_qkv` is [q x (nq/ng), k, v] per KV group, `linear_fc1` is [gate;
up]. Rows past the vocabulary in the embedding and the output layer are padding. They are kept, since the checksum
includes them, and never read.

Invariant: a set of weights is accepted whole or not at all.
[test_embedded_weights: fails_midway_leaves_the_old_weights]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from services.rollout.engine import WeightsRefused
from services.rollout.full_weights import full_weights
from tidegate.elastic.plan.gpt import EMBEDDING, FINAL_NORM, OUTPUT, expert_prefix, layer_name
from tidegate.model_config import ModelConfig

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    gate_up_XH: torch.Tensor
    down_HF: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. A tensor that the model family lacks is None. A dense layer has one expert and no router."""

    attention_norm_H: torch.Tensor
    qkv_XH: torch.Tensor
    qkv_bias_X: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    proj_HX: torch.Tensor
    mlp_norm_H: torch.Tensor
    router_EH: torch.Tensor | None
    experts: tuple[FeedForwardWeights, ...]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a model.

    `named` holds the whole tensors; `embedding_VH` and `output_VH` are views without padding."""

    version: int
    named: Mapping[str, torch.Tensor]
    embedding_VH: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: torch.Tensor
    output_VH: torch.Tensor


def load_weights(
    config: ModelConfig, *, version: int, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device = CPU
) -> DecoderWeights:
    """Copy a full set of tensors to `device`.

    Raises WeightsRefused, which names a missing, unknown, repeated or misshapen tensor."""
    named = full_weights(
        config, version=version, tensors=tensors, prepare=lambda name, tensor: _copied(name, tensor, device)
    )
    return _assemble(config, version, named)


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Hex BLAKE2b-128 of the elements' bytes in row-major order."""
    elements = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(elements.cpu().numpy().data, digest_size=16).hexdigest()


def _copied(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise WeightsRefused(
            f"tensor {name!r} is {tensor.dtype}; the embedded engine takes torch.float32 and torch.bfloat16: cast it"
        )
    return tensor.detach().to(device=device, dtype=torch.float32, copy=True).contiguous()


def _assemble(config: ModelConfig, version: int, named: dict[str, torch.Tensor]) -> DecoderWeights:
    layers = tuple(_layer(config, layer, named) for layer in range(config.num_layers))
    embedding_VH = named[EMBEDDING][: config.vocab_size]
    return DecoderWeights(
        version=version,
        named=MappingProxyType(named),
        embedding_VH=embedding_VH,
        layers=layers,
        final_norm_H=named[FINAL_NORM],
        output_VH=embedding_VH if config.tied_embeddings else named[OUTPUT][: config.vocab_size],
    )


def _layer(config: ModelConfig, layer: int, named: Mapping[str, torch.Tensor]) -> LayerWeights:
    def of(suffix: str) -> torch.Tensor:
        return named[layer_name(layer, suffix)]

    def feed_forward(prefix: str) -> FeedForwardWeights:
        return FeedForwardWeights(of(f"{prefix}linear_fc1.weight"), of(f"{prefix}linear_fc2.weight"))

    is_dense = config.num_experts is None
    prefixes = ["mlp."] if is_dense else [expert_prefix(index) for index in range(config.num_experts or 0)]
    return LayerWeights(
        attention_norm_H=of("input_layernorm.weight"),
        qkv_XH=of("self_attention.linear_qkv.weight"),
        qkv_bias_X=of("self_attention.linear_qkv.bias") if config.qkv_bias else None,
        q_norm_D=of("self_attention.q_layernorm.weight") if config.qk_norm else None,
        k_norm_D=of("self_attention.k_layernorm.weight") if config.qk_norm else None,
        proj_HX=of("self_attention.linear_proj.weight"),
        mlp_norm_H=of("pre_mlp_layernorm.weight"),
        router_EH=None if is_dense else of("mlp.router.weight"),
        experts=tuple(map(feed_forward, prefixes)),
    )
