"""The shapes of models by name, and the numbers of parameters that follow from a shape.

    attention  = layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp        = layers * 3 * hidden * ffn            for each expert of a model with experts
    embedding  = vocabulary * hidden                  once for the input and once for the output, or tied

Norms, biases and routers are below 0.2 % and left out.

Invariant: each shape has the published number of parameters within 1 %. [test_shapes: the_published_number]
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from simulator.assumptions import Source
from simulator.model import ModelSection
from tidegate.config.base import Count, Section
from tidegate.types import Precision

_Layers = Annotated[int, Field(ge=1, le=1000)]
_Size = Annotated[int, Field(ge=1, le=10_000_000)]
_CONFIG = Source("P: config.json of the model that physics.model names")
WEIGHT_BYTES = 2
"""Bytes of a parameter in bf16."""


class ModelName(StrEnum):
    QWEN25_1_5B = "Qwen2.5-1.5B"
    QWEN25_7B = "Qwen2.5-7B"
    QWEN25_32B = "Qwen2.5-32B"
    QWEN3_30B_A3B = "Qwen3-30B-A3B"
    QWEN3_235B_A22B = "Qwen3-235B-A22B"


class ShapeSection(Section):
    """A Llama-like transformer. The defaults are Qwen2.5-7B."""

    num_layers: Annotated[_Layers, _CONFIG] = 28
    hidden_size: Annotated[_Size, _CONFIG] = 3584
    ffn_hidden_size: Annotated[_Size, _CONFIG] = 18_944
    num_heads: Annotated[_Size, _CONFIG] = 28
    num_kv_heads: Annotated[_Size, _CONFIG] = 4
    head_dim: Annotated[_Size, _CONFIG] = 128
    vocab_size: Annotated[_Size, _CONFIG] = 152_064
    tied_embeddings: Annotated[bool, _CONFIG] = False
    qkv_bias: Annotated[bool, _CONFIG] = True
    qk_norm: Annotated[bool, _CONFIG] = False
    num_experts: Annotated[Count, _CONFIG] = 0
    """The experts of size `ffn_hidden_size` in each layer. 0: a dense model."""
    experts_per_token: Annotated[Count, _CONFIG] = 0

    @model_validator(mode="after")
    def _is_a_model(self) -> ShapeSection:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"physics.shape.num_heads={self.num_heads} does not divide by num_kv_heads={self.num_kv_heads}: each "
                "KV head serves the same number of heads; change one of the two"
            )
        if not (self.num_experts == self.experts_per_token == 0 or 1 <= self.experts_per_token <= self.num_experts):
            raise ValueError(
                f"physics.shape.num_experts={self.num_experts} with experts_per_token={self.experts_per_token}: a "
                "token goes to 1 up to num_experts experts; a dense model has 0 of both"
            )
        return self

    @property
    def attention_parameters(self) -> int:
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.num_layers * self.hidden_size * self.head_dim * heads

    @property
    def one_mlp_parameters(self) -> int:
        """Of one MLP, or one expert, in every layer."""
        return self.num_layers * 3 * self.hidden_size * self.ffn_hidden_size

    @property
    def expert_parameters(self) -> int:
        """Of all experts. 0 in a dense model."""
        return self.num_experts * self.one_mlp_parameters

    @property
    def active_expert_parameters(self) -> int:
        return self.experts_per_token * self.one_mlp_parameters

    @property
    def dense_parameters(self) -> int:
        """Those of the layers that every token uses."""
        return self.attention_parameters + (0 if self.num_experts else self.one_mlp_parameters)

    @property
    def embedding_parameters(self) -> int:
        """Of one table."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        return self.dense_parameters + self.expert_parameters + tables * self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Those of `num_parameters` that compute on a token."""
        return self.num_parameters - self.expert_parameters + self.active_expert_parameters

    @property
    def weight_bytes(self) -> int:
        return WEIGHT_BYTES * self.num_parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache, in bf16."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * WEIGHT_BYTES

    def reshard_model(self) -> ModelSection | None:
        """The model that reshards move. None: a model with experts, whose reshards are not planned."""
        if self.num_experts:
            return None
        own = self.model_dump(exclude={"num_experts", "experts_per_token"})
        return ModelSection(padded_vocab_size=self.vocab_size, precision=Precision.BF16, **own)


SHAPES = {
    ModelName.QWEN25_1_5B: ShapeSection(
        hidden_size=1536, ffn_hidden_size=8960, num_heads=12, num_kv_heads=2, vocab_size=151_936, tied_embeddings=True
    ),
    ModelName.QWEN25_7B: ShapeSection(),
    ModelName.QWEN25_32B: ShapeSection(
        num_layers=64, hidden_size=5120, ffn_hidden_size=27_648, num_heads=40, num_kv_heads=8
    ),
    ModelName.QWEN3_30B_A3B: ShapeSection(
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=768,
        num_heads=32,
        vocab_size=151_936,
        qkv_bias=False,
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
    ),
    ModelName.QWEN3_235B_A22B: ShapeSection(
        num_layers=94,
        hidden_size=4096,
        ffn_hidden_size=1536,
        num_heads=64,
        vocab_size=151_936,
        qkv_bias=False,
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
    ),
}
