"""The model of the resharding benchmark, the values of its tensors, and the predicted memory of a switch.

The values of a logical tensor are a window of one repeating random pattern, at an offset of its own. Any rank computes
any values at memory speed, without another rank. Two tensors never have the same values at one offset. No value is
negative, as Adam's second moment requires. The vocabulary needs no padding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import ceil, prod
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

from tests.integration.elastic.dist_checkpoint import optimizer_tensors
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.parameters import Parameter, shard_of
from tidegate.megatron.gpt_provider import GptProvider, fill
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

CPU = torch.device("cpu")
NUM_STEPS = 7.0
"""The step count of every parameter."""
_PERIOD = 1_048_573
"""The elements of the pattern. The number is prime, so that the rows of no tensor are a multiple of it apart."""
_FP32 = 4


class Width(StrEnum):
    """The parameters of a layer, and of both embeddings."""

    SMALL = "small"
    """0.2M and 0.5M."""
    USUAL = "usual"
    """6.3M and 22M: 97.5M parameters with 12 layers."""
    LARGE = "large"
    """45M and 134M: 1.0G parameters with 20 layers."""


def model(num_layers: int, *, width: Width = Width.USUAL) -> GptProvider:
    hidden_size, ffn_hidden_size, num_heads, head_dim, vocab_size = {
        Width.SMALL: (128, 384, 4, 32, 2048),
        Width.USUAL: (768, 2048, 12, 64, 14_336),
        Width.LARGE: (2048, 5632, 16, 128, 32_768),
    }[width]
    config = ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_heads=num_heads,
        num_kv_heads=4,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_seq_len=64,
    )
    return GptProvider(config, padded_vocab=config.vocab_size)


def adam() -> OptimizerConfig:
    """Adam in fp32, sharded over the replicas."""
    return OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32, use_distributed_optimizer=True)


def num_parameters(provider: GptProvider) -> int:
    return sum(prod(parameter.shape) for parameter in provider.parameters())


def peak_bytes(num_parameters: int, source: Layout, target: Layout) -> dict[str, int]:
    """The peak bytes of all ranks by side: replicas of weights and gradients, moments once, and files in memory."""
    weights, moments = _FP32 * num_parameters, 2 * _FP32 * num_parameters

    def trained(layout: Layout) -> int:
        return 2 * weights * layout.dp + moments

    # Each rank gathers or reads the main parameters and moments of its whole model, and passes its results on.
    whole = max((weights + moments) * layout.dp + trained(layout) for layout in (source, target))
    return {
        "dist_checkpointing": whole + 2 * weights + moments,
        "dcp": max(weights * layout.dp + moments for layout in (source, target)) + weights + moments,
        "mcore_refit": weights * (source.dp + target.dp),
        "tidegate": trained(source) + trained(target),
    }


class LogicalState:
    """Weights and optimizer state of one logical model. Its values are computed on `device`."""

    def __init__(self, provider: GptProvider, device: torch.device = CPU) -> None:
        self.provider = provider
        self._by_name = {parameter.name: parameter for parameter in provider.parameters()}
        self._pattern = torch.rand(_PERIOD, generator=torch.Generator().manual_seed(1)).to(device)

    def tensor(self, name: str, kind: StateKind) -> torch.Tensor:
        """The logical tensor."""
        shape = self._by_name[name].shape
        start = zlib.crc32(f"{kind}/{name}".encode()) % _PERIOD
        repeats = ceil((start + prod(shape)) / _PERIOD)
        return self._pattern.repeat(repeats)[start : start + prod(shape)].view(shape)

    def shard(self, name: str, kind: StateKind, mesh: Mesh, me: int) -> torch.Tensor:
        """A member's tensor-parallel shard of the tensor, flat."""
        parameter = self._by_name[name]
        tp_rank = mesh.coordinates(mesh.ranks.index(me)).tp
        shard = shard_of(parameter.shape, parameter.cut, tp=mesh.layout.tp, tp_rank=tp_rank)
        local = torch.empty(shard.num_elements, device=self._pattern.device)
        fill(local, self.tensor(name, kind), shard)
        return local

    def fill(self, chunks: Sequence[torch.nn.Module], optimizer: Any, mesh: Mesh, me: int) -> None:
        """Fill a member's weights, and its part of the optimizer's state if there is an optimizer."""
        for tensor, want, _ in self._held(chunks, optimizer, mesh, me):
            tensor.copy_(want.view(tensor.shape))

    def check(self, chunks: Sequence[torch.nn.Module], optimizer: Any, mesh: Mesh, me: int) -> None:
        """AssertionError: an element is wrong."""
        for tensor, want, what in self._held(chunks, optimizer, mesh, me):
            assert torch.equal(tensor.reshape(-1), want.to(tensor.device)), (
                f"{what} in {mesh.layout} at member {me} is not as it was"
            )

    def parameters(self) -> Iterable[Parameter]:
        return self._by_name.values()

    def _held(
        self, chunks: Sequence[torch.nn.Module], optimizer: Any, mesh: Mesh, me: int
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, str]]:
        for name, weights in self.provider.local_parameters(chunks, mesh, me):
            yield weights.detach(), self.shard(name, StateKind.WEIGHT, mesh, me), name
            held, tensors = (slice(0, 0), {}) if optimizer is None else optimizer_tensors(optimizer, weights)
            for kind, tensor in tensors.items():
                if kind is StateKind.STEP:
                    yield tensor.detach(), torch.tensor([NUM_STEPS]), f"{kind} of {name}"
                elif kind is not StateKind.MAIN_PARAM:  # In fp32 these are views of the weights.
                    yield tensor.detach(), self.shard(name, kind, mesh, me)[held], f"{kind} of {name}"
