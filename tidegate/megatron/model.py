"""Builds a rank's part of the model as Megatron GPTModel chunks, and names its parameters.

Order: `cpu_stand_in.install()`, `parallel.start`, then `build_model_chunks`. Invariants: the initial weights are the
same logical tensors in every layout, for each is drawn from a generator of its own, seeded by (seed, name), and then
cut; padding rows of the vocabulary are 0; there is one chunk a rank (no virtual stages).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from tidegate.megatron.family import check_layout
from tidegate.megatron.shards import EMBEDDING, OUTPUT, Shard, layer_name, layers_of_stage, logical_shapes, shard_of
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

INIT_STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2 and Llama; projections back into the residual stream have it
divided by sqrt(2 * num_layers), or its variance would grow with depth."""

_LAYERS = "decoder.layers."
_RESIDUAL_SUFFIXES = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of this rank with the part of the logical one that it is."""

    shard: Shard
    tensor: torch.nn.Parameter
    tied_copy: bool
    """True for the last stage's copy of tied word embeddings: equal to the first stage's, and not exported."""


def build_model_chunks(
    config: ModelConfig, layout: Layout, *, padded_vocab: int, seed: int, device: torch.device
) -> list[GPTModel]:
    """This rank's chunks, initialised; ValueError where the layout does not fit the family."""
    check_layout(config, layout, padded_vocab=padded_vocab)
    chunk = GPTModel(
        config=_transformer_config(config, layout, device=device),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=padded_vocab,
        max_sequence_length=config.max_seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
    )
    chunks = [chunk.to(device)]
    initialise(chunks, config, layout, padded_vocab=padded_vocab, seed=seed)
    return chunks


def initialise(
    chunks: Sequence[torch.nn.Module], config: ModelConfig, layout: Layout, *, padded_vocab: int, seed: int
) -> None:
    """Fill this rank's parameters with their parts of the logical tensors that `seed` stands for."""
    for parameter in local_parameters(chunks, config, layout, padded_vocab=padded_vocab):
        cut(initial_tensor(config, parameter.shard.name, seed), parameter.shard, into=parameter.tensor)


def initial_tensor(config: ModelConfig, name: str, seed: int) -> torch.Tensor:
    """The logical tensor `name` at the start, in fp32 on the CPU: norms are 1, the rest normal."""
    shape = logical_shapes(config)[name]
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    std = INIT_STD / math.sqrt(2 * config.num_layers) if name.endswith(_RESIDUAL_SUFFIXES) else INIT_STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def cut(logical: torch.Tensor, shard: Shard, *, into: torch.Tensor) -> None:
    """Copy the shard's pieces of a logical tensor into the local one; padding becomes 0."""
    with torch.no_grad():
        into.zero_()
        for piece in shard.pieces:
            source = logical.narrow(shard.dim, piece.logical, piece.size)
            into.narrow(shard.dim, piece.local, piece.size).copy_(source)


def local_parameters(
    chunks: Sequence[torch.nn.Module], config: ModelConfig, layout: Layout, *, padded_vocab: int
) -> Iterator[LocalParameter]:
    """This rank's parameters in the model's order, under logical names with global layer numbers."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    layers = layers_of_stage(config, pp=layout.pp, pp_rank=pp_rank)
    for chunk in chunks:
        for local_name, tensor in chunk.named_parameters():
            name = _logical_name(local_name.removeprefix("module."), first_layer=layers.start)
            tied_copy = config.tied_embeddings and name == OUTPUT
            shard = shard_of(
                config, EMBEDDING if tied_copy else name, tp=layout.tp, tp_rank=tp_rank, padded_vocab=padded_vocab
            )
            if shard.local_shape != tuple(tensor.shape):
                raise AssertionError(f"{name}: Megatron's shard is {tuple(tensor.shape)}, ours {shard.local_shape}")
            yield LocalParameter(shard=shard, tensor=tensor, tied_copy=tied_copy)


def _logical_name(local_name: str, *, first_layer: int) -> str:
    if not local_name.startswith(_LAYERS):
        return local_name
    layer, suffix = local_name.removeprefix(_LAYERS).split(".", 1)
    return layer_name(first_layer + int(layer), suffix)


def _transformer_config(config: ModelConfig, layout: Layout, *, device: torch.device) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
        batch_p2p_sync=False,
    )
