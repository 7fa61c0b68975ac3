"""Shards cover each logical parameter exactly once, and place the fused ones as Megatron does."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.megatron.shards import Piece, layers_of_stage, logical_shapes, shard_of
from tidegate.model_config import ModelConfig

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=8,
    ffn_hidden_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=9,
    max_seq_len=16,
    tied_embeddings=False,
)
PADDED_VOCAB = 16
LAYER = "decoder.layers.3."


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", logical_shapes(MODEL))
def test_the_pieces_of_all_ranks_cover_a_parameter_exactly_once(name: str, tp: int) -> None:
    shards = [shard_of(MODEL, name, tp=tp, tp_rank=rank, padded_vocab=PADDED_VOCAB) for rank in range(tp)]
    counts = np.zeros(shards[0].logical_shape[shards[0].dim], dtype=int)
    for shard in shards[:1] if shards[0].replicated else shards:
        taken = np.zeros(shard.local_shape[shard.dim], dtype=int)
        for piece in shard.pieces:
            counts[piece.logical : piece.logical + piece.size] += 1
            taken[piece.local : piece.local + piece.size] += 1
        assert taken.max(initial=0) <= 1
        assert name.endswith(("word_embeddings.weight", "output_layer.weight")) or taken.min() == 1
    assert counts.tolist() == [1] * len(counts)


def test_fc1_holds_its_gate_rows_and_then_its_up_rows() -> None:
    shard = shard_of(MODEL, LAYER + "mlp.linear_fc1.weight", tp=2, tp_rank=1, padded_vocab=PADDED_VOCAB)
    assert shard.local_shape == (12, 8)
    assert shard.pieces == (Piece(local=0, logical=6, size=6), Piece(local=6, logical=18, size=6))


def test_qkv_is_cut_between_groups() -> None:
    shard = shard_of(MODEL, LAYER + "self_attention.linear_qkv.weight", tp=2, tp_rank=1, padded_vocab=PADDED_VOCAB)
    group_rows = (2 + 2) * MODEL.head_dim
    assert shard.pieces == (Piece(local=0, logical=group_rows, size=group_rows),)


def test_a_rank_whose_vocabulary_rows_are_all_padding_has_no_piece() -> None:
    held = [
        shard_of(MODEL, "output_layer.weight", tp=4, tp_rank=rank, padded_vocab=PADDED_VOCAB).pieces for rank in (2, 3)
    ]
    assert held == [(Piece(local=0, logical=8, size=1),), ()]


def test_stages_hold_equal_runs_of_layers() -> None:
    assert [list(layers_of_stage(MODEL, pp=2, pp_rank=rank)) for rank in (0, 1)] == [[0, 1], [2, 3]]


def test_a_parameter_of_another_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'decoder.layers.4.input_layernorm.weight' is not of this family"):
        shard_of(MODEL, "decoder.layers.4.input_layernorm.weight", tp=1, tp_rank=0, padded_vocab=PADDED_VOCAB)
