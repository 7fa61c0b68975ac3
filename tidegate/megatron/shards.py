"""Which part of each logical parameter a rank holds. Pure integers: no tensor is touched here.

A logical parameter is the unsharded tensor under Megatron's name with the layer's global number; its vocabulary rows
are the real ones, without padding. A shard is a list of pieces along one dim: local rows `local` onwards are logical
rows `logical` onwards. Megatron's layouts, as they are:
- vocabulary (word embeddings, output layer): equal contiguous rows of the padded vocabulary; padding rows are in no
  piece;
- `linear_qkv`: equal contiguous rows of the logical tensor, which is interleaved by key/value group:
  [queries of group 0, key 0, value 0, queries of group 1, ...];
- `linear_fc1`: each rank holds [gate_i; up_i], the logical tensor is [gate; up];
- `linear_proj`, `linear_fc2`: equal contiguous columns; norms: whole on every rank.
Invariant: over the tp ranks of a stage the pieces cover each element of the logical tensor exactly once, or, where
`replicated`, once a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.model_config import ModelConfig

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
_LAYER_NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
_QKV, _PROJ = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
_FC1, _FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` indices along the shard's dim, from `local` in the local tensor and from `logical` in the logical one."""

    local: int
    logical: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a logical parameter."""

    name: str
    logical_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]
    replicated: bool
    """True where every tp rank of the stage holds the whole tensor."""


def layer_name(layer: int, suffix: str) -> str:
    return f"decoder.layers.{layer}.{suffix}"


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every logical parameter of the model, in order from input to output."""
    hidden, attention = config.hidden_size, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes[layer_name(layer, _LAYER_NORMS[0])] = (hidden,)
        shapes[layer_name(layer, _QKV)] = ((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, hidden)
        shapes[layer_name(layer, _PROJ)] = (hidden, attention)
        shapes[layer_name(layer, _LAYER_NORMS[1])] = (hidden,)
        shapes[layer_name(layer, _FC1)] = (2 * config.ffn_hidden_size, hidden)
        shapes[layer_name(layer, _FC2)] = (hidden, config.ffn_hidden_size)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    return shapes


def shard_of(config: ModelConfig, name: str, *, tp: int, tp_rank: int, padded_vocab: int) -> Shard:
    """The part of the logical parameter `name` that tp rank `tp_rank` of `tp` holds; ValueError on an unknown name."""
    shapes = logical_shapes(config)
    if name not in shapes:
        raise ValueError(f"parameter {name!r} is not of this family; it has {len(shapes)}: {', '.join(shapes)}")
    shape = shapes[name]
    suffix = name.split(".", 3)[-1] if name.startswith("decoder.layers.") else name
    if suffix in (EMBEDDING, OUTPUT):
        return _vocabulary_shard(name, shape, padded_vocab=padded_vocab, tp=tp, tp_rank=tp_rank)
    if suffix == _FC1:
        half = shape[0] // 2
        size = half // tp
        pieces = (Piece(0, tp_rank * size, size), Piece(size, half + tp_rank * size, size))
        return Shard(name, shape, (2 * size, shape[1]), 0, pieces, replicated=tp == 1)
    if suffix in (_QKV, _PROJ, _FC2):
        dim = 0 if suffix == _QKV else 1
        size = shape[dim] // tp
        local_shape = (size, shape[1]) if dim == 0 else (shape[0], size)
        return Shard(name, shape, local_shape, dim, (Piece(0, tp_rank * size, size),), replicated=tp == 1)
    return Shard(name, shape, shape, 0, (Piece(0, 0, shape[0]),), replicated=True)


def _vocabulary_shard(name: str, shape: tuple[int, ...], *, padded_vocab: int, tp: int, tp_rank: int) -> Shard:
    rows = padded_vocab // tp
    first = tp_rank * rows
    real = min(rows, shape[0] - first)
    pieces = (Piece(0, first, real),) if real > 0 else ()
    return Shard(name, shape, (rows, shape[1]), 0, pieces, replicated=tp == 1)


def layers_of_stage(config: ModelConfig, *, pp: int, pp_rank: int) -> range:
    """The global numbers of the layers of a pipeline stage: equal contiguous runs."""
    size = config.num_layers // pp
    return range(pp_rank * size, (pp_rank + 1) * size)
