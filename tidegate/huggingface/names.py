"""The tensors of a Hugging Face checkpoint that form a logical parameter, and the rows of the parameter in each. Pure.

Hugging Face separates what Megatron fuses: queries, keys and values, which the fused parameter holds group by group,
and the gate and the up projection. Every other parameter is one tensor under another name.

Invariant: over a model's parameters each tensor occurs once, and each row of a parameter is in one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tidegate.elastic.plan.gpt import EMBEDDING, FINAL_NORM, OUTPUT
from tidegate.elastic.plan.parameters import Parameter
from tidegate.model_config import ModelConfig

EMBEDDING_TENSOR = "model.embed_tokens.weight"
OUTPUT_TENSOR = "lm_head.weight"

_ENDS = {EMBEDDING: EMBEDDING_TENSOR, FINAL_NORM: "model.norm.weight", OUTPUT: OUTPUT_TENSOR}
_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.local_experts."
_QKV = "self_attention.linear_qkv."
_GATE_UP = "linear_fc1.weight"
_SUFFIXES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


class Rows(NamedTuple):
    """Rows of a parameter."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorOf:
    """A tensor of a checkpoint: these rows of one parameter, one after another."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[Rows, ...]


def tensors_of(parameter: Parameter, model: ModelConfig) -> tuple[TensorOf, ...]:
    """The tensors that form a logical parameter of the model."""
    return tuple(
        TensorOf(name, (sum(part.size for part in rows), *parameter.shape[1:]), rows)
        for name, rows in _names(parameter, model)
    )


def _names(parameter: Parameter, model: ModelConfig) -> Iterator[tuple[str, tuple[Rows, ...]]]:
    whole = (Rows(0, parameter.shape[0]),)
    if parameter.name in _ENDS:
        yield _ENDS[parameter.name], whole
        return
    layer, suffix = parameter.name.removeprefix(_LAYERS).split(".", 1)
    prefix = f"model.layers.{layer}."
    if suffix.startswith(_QKV):
        yield from _attention(f"{prefix}self_attn.", suffix.removeprefix(_QKV), model)
    elif suffix in _SUFFIXES:
        yield prefix + _SUFFIXES[suffix], whole
    else:
        mlp = f"{prefix}mlp."
        if suffix.startswith(_EXPERTS):
            mlp += f"experts.{suffix.removeprefix(_EXPERTS).split('.', 1)[0]}."
        if suffix.endswith(_GATE_UP):
            width = parameter.shape[0] // 2
            yield f"{mlp}gate_proj.weight", (Rows(0, width),)
            yield f"{mlp}up_proj.weight", (Rows(width, width),)
        else:
            yield f"{mlp}down_proj.weight", whole


def _attention(prefix: str, kind: str, model: ModelConfig) -> Iterator[tuple[str, tuple[Rows, ...]]]:
    head, queries = model.head_dim, model.num_queries_per_group
    group_rows = (queries + 2) * head
    for letter, first, count in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
        groups = range(model.num_kv_heads)
        yield (
            f"{prefix}{letter}_proj.{kind}",
            tuple(Rows(group * group_rows + first * head, count * head) for group in groups),
        )
