"""The model of a simulated trainer: a dense GPT of Megatron's with Adam. The plans of reshards need it.

The defaults are Qwen2.5-7B, the model of the published 64-GPU timeline. A job's own model comes from its `ModelConfig`.
"""

from __future__ import annotations

from math import prod
from typing import Annotated

from pydantic import Field, model_validator

from simulator.assumptions import Source
from tidegate.config.base import Section
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.layout import LayoutRefused, even_chunks
from tidegate.elastic.plan.optimizers import ADAM, StateKind, StateTensor
from tidegate.elastic.plan.parameters import shard_of
from tidegate.model_config import ModelConfig
from tidegate.types import Layout, Precision

_Layers = Annotated[int, Field(ge=1, le=1000)]
"""Every layer is planned. The deepest models have some hundred."""
_Size = Annotated[int, Field(ge=1, le=10_000_000)]
_PUBLISHED = Source("P: config.json of Qwen2.5-7B")


class ModelSection(Section):
    """The fields of `GptShape`."""

    num_layers: Annotated[_Layers, _PUBLISHED] = 28
    hidden_size: Annotated[_Size, _PUBLISHED] = 3584
    ffn_hidden_size: Annotated[_Size, _PUBLISHED] = 18944
    num_heads: Annotated[_Size, _PUBLISHED] = 28
    num_kv_heads: Annotated[_Size, _PUBLISHED] = 4
    head_dim: Annotated[_Size, Source("P: config.json of Qwen2.5-7B: hidden_size / num_attention_heads")] = 128
    vocab_size: Annotated[_Size, _PUBLISHED] = 152_064
    padded_vocab_size: Annotated[_Size, Source("P: the vocabulary divides by 128 times any tp up to 4")] = 152_064
    tied_embeddings: Annotated[bool, _PUBLISHED] = False
    qkv_bias: Annotated[bool, Source("P: Qwen2's attention")] = True
    qk_norm: Annotated[bool, Source("P: Qwen2's attention has none")] = False
    precision: Annotated[
        Precision, Source("A: usual in Megatron; 2 bytes of weights a parameter, 12 of the optimizer")
    ] = Precision.BF16

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSection:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide by model.num_kv_heads={self.num_kv_heads}: each KV "
                "head serves the same number of heads; change one of the two"
            )
        return self

    @classmethod
    def of(cls, model: ModelConfig, *, padded_vocab: int, precision: Precision) -> ModelSection:
        """ValueError: the model has experts."""
        if model.num_experts is not None:
            raise ValueError(f"reshards of a model of {model.num_experts} experts are not planned here")
        own = {name: getattr(model, name) for name in cls.model_fields.keys() - {"padded_vocab_size", "precision"}}
        return cls(padded_vocab_size=padded_vocab, precision=precision, **own)

    def shape(self) -> GptShape:
        itemsize = 2 if self.precision is Precision.BF16 else 4
        return GptShape(itemsize=itemsize, **self.model_dump(exclude={"precision"}))

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The tensors that Adam keeps for each parameter; see `tidegate.elastic.model.adam`."""
        if self.precision is Precision.BF16:
            return ADAM
        return tuple(state for state in ADAM if state.kind is not StateKind.MAIN_PARAM)

    @property
    def num_parameters(self) -> int:
        return sum(prod(parameter.shape) for parameter in gpt_parameters(self.shape()))

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.shape().itemsize

    @property
    def optimizer_bytes(self) -> int:
        return self.num_parameters * sum(state.itemsize for state in self.states)

    def refusal(self, layout: Layout) -> str:
        """The reason why the layout cannot hold the model. Empty: it can."""
        try:
            even_chunks(self.num_layers, pp=layout.pp, vpp=layout.vpp)
            for parameter in gpt_parameters(self.shape()):
                shard_of(parameter.shape, parameter.cut, tp=layout.tp, tp_rank=0)
        except (LayoutRefused, ValueError) as error:
            return str(error)
        return ""
