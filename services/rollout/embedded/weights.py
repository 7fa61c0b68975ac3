"""The weights an embedded engine holds: full logical Megatron tensors, kept as they came, so that checksums compare.

A set is accepted whole or not at all. Fused tensors stay fused: `linear_qkv` is [q x (nq/ng), k, v] per KV group,
`linear_fc1` is [gate; up]. Rows past the vocabulary in the embedding and the output layer are padding; they are held
(their checksum counts) and never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from services.rollout.engine import WeightsRefused
from tidegate.model_config import ModelConfig

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
MOST_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm_H: torch.Tensor
    qkv_XH: torch.Tensor
    proj_HX: torch.Tensor
    mlp_norm_H: torch.Tensor
    gate_up_XH: torch.Tensor
    down_HF: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`embedding_VH` and `output_VH` end at the vocabulary; `named` holds the whole tensors that they are views of."""

    version: int
    named: Mapping[str, torch.Tensor]
    embedding_VH: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: torch.Tensor
    output_VH: torch.Tensor


def layer_name(layer: int, part: str) -> str:
    return f"decoder.layers.{layer}.{part}.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every name of a full set with its shape, the vocabulary without padding."""
    hidden, ffn, attended = config.hidden_size, config.ffn_hidden_size, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes[layer_name(layer, "input_layernorm")] = (hidden,)
        shapes[layer_name(layer, "self_attention.linear_qkv")] = (config.qkv_size, hidden)
        shapes[layer_name(layer, "self_attention.linear_proj")] = (hidden, attended)
        shapes[layer_name(layer, "pre_mlp_layernorm")] = (hidden,)
        shapes[layer_name(layer, "mlp.linear_fc1")] = (2 * ffn, hidden)
        shapes[layer_name(layer, "mlp.linear_fc2")] = (hidden, ffn)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    return shapes


def load_weights(config: ModelConfig, *, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> DecoderWeights:
    """Copy a full set of tensors; WeightsRefused names what is missing, unknown, repeated or of a wrong shape."""
    want = tensor_shapes(config)
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name not in want:
            raise WeightsRefused(f"weights version {version}: unknown tensor {name!r}; this model has {_some(want)}")
        if name in named:
            raise WeightsRefused(f"weights version {version}: tensor {name!r} came twice; send each once")
        _check_tensor(name, tensor, want[name])
        named[name] = tensor.detach().to(device="cpu", copy=True).contiguous()
    missing = [name for name in want if name not in named]
    if missing:
        raise WeightsRefused(
            f"weights version {version}: {len(missing)} of {len(want)} tensors are missing: {_some(missing)}; "
            f"an update is a full set"
        )
    return _assemble(config, version, named)


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Hex BLAKE2b-128 of the elements' bytes in row-major order."""
    elements = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(elements.numpy().data, digest_size=16).hexdigest()


def _check_tensor(name: str, tensor: torch.Tensor, want: tuple[int, ...]) -> None:
    got = tuple(tensor.shape)
    padded = name in (EMBEDDING, OUTPUT) and len(got) == 2 and got[0] >= want[0] and got[1] == want[1]
    if got != want and not padded:
        more = " or more rows" if name in (EMBEDDING, OUTPUT) else ""
        raise WeightsRefused(
            f"tensor {name!r} has shape {list(got)}, want {list(want)}{more}: send it whole, unsharded"
        )
    if tensor.dtype != torch.float32:
        raise WeightsRefused(
            f"tensor {name!r} is {tensor.dtype}; the embedded engine computes in torch.float32: cast it"
        )


def _assemble(config: ModelConfig, version: int, named: dict[str, torch.Tensor]) -> DecoderWeights:
    layers = tuple(
        LayerWeights(
            attention_norm_H=named[layer_name(layer, "input_layernorm")],
            qkv_XH=named[layer_name(layer, "self_attention.linear_qkv")],
            proj_HX=named[layer_name(layer, "self_attention.linear_proj")],
            mlp_norm_H=named[layer_name(layer, "pre_mlp_layernorm")],
            gate_up_XH=named[layer_name(layer, "mlp.linear_fc1")],
            down_HF=named[layer_name(layer, "mlp.linear_fc2")],
        )
        for layer in range(config.num_layers)
    )
    embedding_VH = named[EMBEDDING][: config.vocab_size]
    return DecoderWeights(
        version=version,
        named=MappingProxyType(named),
        embedding_VH=embedding_VH,
        layers=layers,
        final_norm_H=named[FINAL_NORM],
        output_VH=embedding_VH if config.tied_embeddings else named[OUTPUT][: config.vocab_size],
    )


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    rest = f" and {len(shown) - MOST_NAMES_SHOWN} more" if len(shown) > MOST_NAMES_SHOWN else ""
    return ", ".join(shown[:MOST_NAMES_SHOWN]) + rest
