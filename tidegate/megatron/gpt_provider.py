"""Megatron's GPT for the elastic actor: which meshes it fits, its parts' names, its initial weights.

Order: `mesh`, the groups, `build`, then `initialise` or another way to fill the weights.

Invariants:
- The initial weights are the same logical tensors in every mesh. Each tensor comes from `weights`; or it is drawn in
  fp32 from its own generator, seeded by (seed, name), then cut, then rounded to the model's dtype.
- Padding rows of the vocabulary are 0.
- A chunk with other shapes than the planner's is refused, with both shapes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule

from tidegate.elastic.plan.gpt import EMBEDDING, OUTPUT
from tidegate.elastic.plan.layout import Edge, Home, LayoutRefused, Mesh, even_chunks
from tidegate.elastic.plan.parameters import Parameter, Shard, Split, shard_of
from tidegate.megatron.attention import GatheringAttention
from tidegate.megatron.family import model_parameters
from tidegate.megatron.gpt_chunks import build_chunks
from tidegate.model_config import ModelConfig
from tidegate.types import Layout, Precision, Recompute

INIT_STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2 and Llama.

Projections back into the residual stream have it divided by sqrt(2 * num_layers): otherwise the stream's variance would
grow with depth.
"""

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}

_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.local_experts."
_RESIDUAL_SUFFIXES = ("linear_proj.weight", "linear_fc2.weight")

Chunks = tuple[tuple[int, ...], ...]
"""`chunks[v][stage]` layers, as in Mesh."""


class InitialWeights(Protocol):
    """The source of initial weights that are not random."""

    def fill(self, local: torch.Tensor, parameter: Parameter, shard: Shard) -> None:
        """Fill a rank's tensor with its shard of the parameter. Padding becomes 0."""


@dataclass(frozen=True)
class GptProvider:
    config: ModelConfig
    padded_vocab: int
    dtype: torch.dtype = torch.float32
    uneven_stages: Mapping[tuple[int, int], Chunks] = field(default_factory=dict)
    """The uneven stages by (pp, vpp). Other sizes have equal stages."""
    weights: InitialWeights | None = None
    """None: weights are drawn at random."""
    recompute: Recompute = Recompute.NONE
    core_attention: type = GatheringAttention
    """Megatron's module for attention. Sequences without padding need another one."""

    def parameters(self) -> tuple[Parameter, ...]:
        return self._parameters

    def mesh(self, layout: Layout, ranks: tuple[int, ...]) -> Mesh:
        stages = self.uneven_stages.get((layout.pp, layout.vpp))
        chunks = stages or even_chunks(self.config.num_layers, pp=layout.pp, vpp=layout.vpp)
        mesh = Mesh(layout, ranks, chunks)
        if mesh.num_layers != self.config.num_layers:
            raise LayoutRefused(
                f"layout {layout}: the stages {chunks} hold {mesh.num_layers} layers, the model has "
                f"{self.config.num_layers}; assign each layer to one stage"
            )
        if self.config.num_experts is None and layout.ep > 1:
            raise LayoutRefused(f"layout {layout}: ep={layout.ep} and the model has no experts; legal ep: 1")
        for parameter in self._parameters:
            # All layers are alike, so the first one decides.
            if parameter.place == 0 or isinstance(parameter.place, Edge):
                _check_fit(parameter, layout)
        return mesh

    def build(
        self, mesh: Mesh, me: int, groups: ProcessGroupCollection, *, device: torch.device
    ) -> list[MegatronModule]:
        chunks = build_chunks(
            self.config,
            mesh,
            me,
            groups,
            padded_vocab=self.padded_vocab,
            dtype=self.dtype,
            device=device,
            recompute=self.recompute,
            core_attention=self.core_attention,
        )
        return list(chunks)

    def local_parameters(
        self, chunks: Sequence[torch.nn.Module], mesh: Mesh, me: int
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        place = mesh.coordinates(mesh.ranks.index(me))
        layers = {home: layer for layer, home in enumerate(mesh.homes())}
        first_expert = place.ep * ((self.config.num_experts or 0) // mesh.layout.ep)
        for number, chunk in enumerate(chunks):
            for local_name, tensor in chunk.named_parameters():
                name = local_name.removeprefix("module.")
                if name.startswith(_LAYERS):
                    index, suffix = name.removeprefix(_LAYERS).split(".", 1)
                    layer = layers[Home(place.stage, number, int(index))]
                    name = f"{_LAYERS}{layer}.{_with_global_expert(suffix, first_expert)}"
                elif name == OUTPUT and self.config.tied_embeddings:
                    name = EMBEDDING
                self._check_shape(name, tensor, mesh.layout.tp, place.tp)
                yield name, tensor

    def initialise(self, chunks: Sequence[torch.nn.Module], mesh: Mesh, me: int, *, seed: int) -> None:
        tp_rank = mesh.coordinates(mesh.ranks.index(me)).tp
        for name, tensor in self.local_parameters(chunks, mesh, me):
            parameter = self._by_name[name]
            shard = shard_of(parameter.shape, parameter.cut, tp=mesh.layout.tp, tp_rank=tp_rank)
            if self.weights is None:
                fill(tensor, self.initial_tensor(name, seed), shard)
            else:
                self.weights.fill(tensor, parameter, shard)

    def initial_tensor(self, name: str, seed: int) -> torch.Tensor:
        """The initial logical tensor `name`, in fp32 on the CPU: norms are 1, biases 0, other weights normal."""
        return initial_tensor(name, self._by_name[name].shape, num_layers=self.config.num_layers, seed=seed)

    @cached_property
    def _parameters(self) -> tuple[Parameter, ...]:
        return model_parameters(self.config, padded_vocab=self.padded_vocab, itemsize=self.dtype.itemsize)

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self._parameters}

    def _check_shape(self, name: str, tensor: torch.Tensor, tp: int, tp_rank: int) -> None:
        parameter = self._by_name[name]
        want = _local_shape(parameter, shard_of(parameter.shape, parameter.cut, tp=tp, tp_rank=tp_rank))
        if want != tuple(tensor.shape):
            raise ValueError(f"{name}: Megatron's shard is {tuple(tensor.shape)}, the planner's is {want}; tp={tp}")


def initial_tensor(name: str, shape: tuple[int, ...], *, num_layers: int, seed: int) -> torch.Tensor:
    """In fp32 on the CPU: zeros for a bias, ones for a norm, otherwise normal."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    std = INIT_STD / math.sqrt(2 * num_layers) if name.endswith(_RESIDUAL_SUFFIXES) else INIT_STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def fill(local: torch.Tensor, logical: torch.Tensor, shard: Shard) -> None:
    """Copy a shard's pieces of the logical tensor into the local one. Padding becomes 0."""
    with torch.no_grad():
        local.zero_()
        target, source = local.view(shard.rows, shard.width), logical.view(shard.rows, -1)
        for piece in shard.pieces:
            part = source[:, piece.logical : piece.logical + piece.size]
            target[:, piece.local : piece.local + piece.size].copy_(part)


def _check_fit(parameter: Parameter, layout: Layout) -> None:
    try:
        shard_of(parameter.shape, parameter.cut, tp=layout.tp, tp_rank=0)
        if parameter.expert is not None:
            parameter.expert.ep_rank(layout.ep)
    except LayoutRefused as refusal:
        raise LayoutRefused(f"layout {layout} does not fit {parameter.name}: {refusal}") from refusal


def _local_shape(parameter: Parameter, shard: Shard) -> tuple[int, ...]:
    if shard.rows * shard.width == math.prod(parameter.shape):
        return parameter.shape
    dim = parameter.cut.dim if isinstance(parameter.cut, Split) else 0
    inner = parameter.shape[dim + 1 :]
    return (*parameter.shape[:dim], shard.width // math.prod(inner), *inner)


def _with_global_expert(suffix: str, first_expert: int) -> str:
    if not suffix.startswith(_EXPERTS):
        return suffix
    index, rest = suffix.removeprefix(_EXPERTS).split(".", 1)
    return f"{_EXPERTS}{first_expert + int(index)}.{rest}"
