"""Builds a rank's part of the model as Megatron GPTModel chunks, and names its parameters.

Order: `cpu_stand_in.install()`, `parallel.start`, then `build_model_chunks`. Invariants: the initial weights are the
same logical tensors in every layout, for each is drawn from a generator of its own, seeded by (seed, name), and then
cut; padding rows of the vocabulary are 0; there is one chunk a rank (no virtual stages).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from tidegate.elastic.layout import Mesh, even_chunks
from tidegate.megatron.family import check_layout
from tidegate.megatron.gpt_chunks import build_chunks
from tidegate.megatron.gpt_provider import initial_tensor
from tidegate.megatron.shards import EMBEDDING, OUTPUT, Shard, layer_name, layers_of_stage, shard_of
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

_LAYERS = "decoder.layers."


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of this rank with the part of the logical one that it is."""

    shard: Shard
    tensor: torch.nn.Parameter
    tied_copy: bool
    """True for the last stage's copy of tied word embeddings: equal to the first stage's, and not exported."""


def build_model_chunks(
    config: ModelConfig,
    layout: Layout,
    groups: ProcessGroupCollection,
    *,
    padded_vocab: int,
    seed: int,
    device: torch.device,
) -> list[GPTModel]:
    """This rank's chunks, initialised; ValueError where the layout does not fit the family."""
    check_layout(config, layout, padded_vocab=padded_vocab)
    mesh = Mesh(layout, tuple(range(layout.num_ranks)), even_chunks(config.num_layers, pp=layout.pp))
    chunks = build_chunks(
        config, mesh, dist.get_rank(), groups, padded_vocab=padded_vocab, dtype=torch.float32, device=device
    )
    initialise(chunks, config, layout, padded_vocab=padded_vocab, seed=seed)
    return chunks


def initialise(
    chunks: Sequence[torch.nn.Module], config: ModelConfig, layout: Layout, *, padded_vocab: int, seed: int
) -> None:
    """Fill this rank's parameters with their parts of the logical tensors that `seed` stands for."""
    for parameter in local_parameters(chunks, config, layout, padded_vocab=padded_vocab):
        shard = parameter.shard
        logical = initial_tensor(shard.name, shard.logical_shape, num_layers=config.num_layers, seed=seed)
        cut(logical, shard, into=parameter.tensor)


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
