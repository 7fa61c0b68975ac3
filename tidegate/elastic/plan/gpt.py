"""The logical parameters of Megatron's GPT, dense or with experts, in order from input to output.

Names are Megatron's, with the global numbers of layer and expert (experts have `SequentialMLP`'s names). Every form of
cut occurs: vocabulary rows, group-interleaved QKV with its bias, row-parallel projections, [gate; up], whole norms and
routers, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidegate.elastic.plan.layout import Edge
from tidegate.elastic.plan.parameters import Expert, GroupedQkv, Parameter, Split, Vocabulary, Whole

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


def layer_name(layer: int, suffix: str) -> str:
    """The name of a layer's parameter, by the layer's global number."""
    return f"decoder.layers.{layer}.{suffix}"


def expert_prefix(index: int) -> str:
    """The prefix of an expert's names within its layer, by the expert's global number."""
    return f"mlp.experts.local_experts.{index}."


@dataclass(frozen=True, slots=True)
class GptShape:
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int | None = None
    """None: a dense model. Otherwise every layer has a router and this many experts of `ffn_hidden_size`."""
    itemsize: int = 2
    sequence_parallel: bool = False


def gpt_parameters(shape: GptShape) -> tuple[Parameter, ...]:
    hidden, vocabulary = shape.hidden_size, Vocabulary(shape.padded_vocab_size)
    table = (shape.vocab_size, hidden)
    ends = Edge.BOTH if shape.tied_embeddings else Edge.INPUT
    parameters = [Parameter(EMBEDDING, table, shape.itemsize, vocabulary, ends)]
    for layer in range(shape.num_layers):
        parameters += _layer(shape, layer)
    parameters.append(_norm(FINAL_NORM, hidden, Edge.OUTPUT, shape))
    if not shape.tied_embeddings:
        parameters.append(Parameter(OUTPUT, table, shape.itemsize, vocabulary, Edge.OUTPUT))
    return tuple(parameters)


def _layer(shape: GptShape, layer: int) -> Iterator[Parameter]:
    prefix, hidden, size = layer_name(layer, ""), shape.hidden_size, shape.itemsize
    qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = GroupedQkv(shape.num_kv_heads)
    yield _norm(prefix + "input_layernorm.weight", hidden, layer, shape)
    yield Parameter(prefix + "self_attention.linear_qkv.weight", (qkv_rows, hidden), size, qkv, layer)
    if shape.qkv_bias:
        yield Parameter(prefix + "self_attention.linear_qkv.bias", (qkv_rows,), size, qkv, layer)
    if shape.qk_norm:
        yield _norm(prefix + "self_attention.q_layernorm.weight", shape.head_dim, layer, shape)
        yield _norm(prefix + "self_attention.k_layernorm.weight", shape.head_dim, layer, shape)
    attention = shape.num_heads * shape.head_dim
    yield Parameter(prefix + "self_attention.linear_proj.weight", (hidden, attention), size, Split(1), layer)
    yield _norm(prefix + "pre_mlp_layernorm.weight", hidden, layer, shape)
    if shape.num_experts is None:
        yield from _mlp(shape, prefix + "mlp.", layer, None)
        return
    yield Parameter(
        prefix + "mlp.router.weight",
        (shape.num_experts, hidden),
        size,
        Whole(),
        layer,
        sequence_parallel=shape.sequence_parallel,
    )
    for index in range(shape.num_experts):
        expert = Expert(index, shape.num_experts)
        yield from _mlp(shape, prefix + expert_prefix(index), layer, expert)


def _mlp(shape: GptShape, prefix: str, layer: int, expert: Expert | None) -> Iterator[Parameter]:
    hidden, ffn, size = shape.hidden_size, shape.ffn_hidden_size, shape.itemsize
    gate_up = Split(0, stride=2)
    yield Parameter(prefix + "linear_fc1.weight", (2 * ffn, hidden), size, gate_up, layer, expert)
    yield Parameter(prefix + "linear_fc2.weight", (hidden, ffn), size, Split(1), layer, expert)


def _norm(name: str, size: int, place: int | Edge, shape: GptShape) -> Parameter:
    return Parameter(name, (size,), shape.itemsize, Whole(), place, sequence_parallel=shape.sequence_parallel)
