"""Every cut of Megatron's gives each tp rank its columns, once each. Impossible cuts are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.elastic import cutter
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.layout import Edge, LayoutRefused
from tidegate.elastic.plan.parameters import (
    Cut,
    Expert,
    GroupedQkv,
    Parameter,
    Shard,
    Split,
    Vocabulary,
    Whole,
    shard_of,
)

SHAPE = GptShape(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    vocab_size=13,
    padded_vocab_size=16,
)
CUTS: dict[str, tuple[tuple[int, ...], Cut]] = {
    "whole": ((5, 3), Whole()),
    "column": ((8, 3), Split(0)),
    "row": ((3, 8), Split(1)),
    "gate and up": ((16, 3), Split(0, stride=2)),
    "interleaved blocks of columns": ((3, 16), Split(1, stride=2)),
    "qkv": ((4 * 5, 3), GroupedQkv(4)),
    "qkv bias": ((4 * 5,), GroupedQkv(4)),
    "vocabulary whose last rank has padding only": ((5, 3), Vocabulary(8)),
}


def gathered(shape: tuple[int, ...], cut: Cut, tp: int) -> Sequence[cutter.Array]:
    """Each tp rank's shard, filled from the logical matrix by its pieces."""
    whole = np.arange(np.prod(shape))
    found = []
    for tp_rank in range(tp):
        shard = shard_of(shape, cut, tp=tp, tp_rank=tp_rank)
        local = np.full((shard.rows, shard.width), cutter.PADDING)
        for local_col, logical, size in shard.pieces:
            local[:, local_col : local_col + size] = whole.reshape(shard.rows, -1)[:, logical : logical + size]
        found.append(local.reshape(-1))
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CUTS)
def test_a_shard_is_what_megatron_cuts(name: str, tp: int) -> None:
    shape, cut = CUTS[name]
    parameter = Parameter(name, shape, 2, cut, 0)
    whole = np.arange(np.prod(shape)).reshape(shape)
    for tp_rank, got in enumerate(gathered(shape, cut, tp)):
        np.testing.assert_array_equal(got, cutter.cut(parameter, whole, tp, tp_rank).reshape(-1))


def test_only_an_experts_own_rank_has_it() -> None:
    assert [Expert(index, 6).ep_rank(3) for index in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_model_with_experts_has_a_router_and_two_matrices_an_expert_in_each_layer() -> None:
    parameters = gpt_parameters(replace(SHAPE, num_experts=3, qk_norm=True, qkv_bias=True, tied_embeddings=True))
    layer = [p.name.removeprefix("decoder.layers.1.") for p in parameters if p.place == 1]
    experts = [f"mlp.experts.local_experts.{i}.linear_fc{j}.weight" for i in range(3) for j in (1, 2)]
    want = [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *experts,
    ]
    assert layer == want
    assert [p.place for p in parameters if not isinstance(p.place, int)] == [Edge.BOTH, Edge.OUTPUT]


UNEVEN: dict[str, tuple[tuple[tuple[int, ...], Cut], str]] = {
    "groups": (((12, 2), GroupedQkv(3)), "3 key/value groups do not divide by tp=2; legal tp: 1, 3"),
    "columns": (((9, 2), Split(0)), "legal tp: 1, 3, 9"),
    "halves": (((6, 2), Split(0, stride=2)), "legal tp: 1, 3"),
    "vocabulary": (((6, 2), Vocabulary(7)), "7 padded vocabulary rows do not divide by tp=2"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_an_uneven_cut_is_refused(name: str) -> None:
    (shape, cut), want = UNEVEN[name]
    with pytest.raises(LayoutRefused, match=want):
        shard_of(shape, cut, tp=2, tp_rank=0)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutRefused, match="6 experts do not divide by ep=4; legal ep: 1, 2, 3, 6"):
        Expert(0, 6).ep_rank(4)


IMPOSSIBLE: dict[str, tuple[Callable[[], Parameter], str]] = {
    "no element": (lambda: Parameter("p", (0, 3), 2, Whole(), 0), "has no element"),
    "a sequence-parallel mark on a cut parameter": (
        lambda: Parameter("p", (4, 3), 2, Split(0), 0, sequence_parallel=True),
        "each tp rank holds whole",
    ),
    "an expert too many": (lambda: Parameter("p", (4,), 2, Whole(), 0, Expert(4, 4)), "is not one of 4"),
    "a dim too many": (lambda: Parameter("p", (4,), 2, Split(1), 0), "along dim 1"),
    "blocks of different sizes": (lambda: Parameter("p", (5,), 2, Split(0, stride=2), 0), "no 2 equal blocks"),
    "half a group": (lambda: Parameter("p", (5,), 2, GroupedQkv(2), 0), "not 2 equal groups"),
    "more rows than padded ones": (lambda: Parameter("p", (5, 1), 2, Vocabulary(4), 0), "do not fit into 4"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_parameter_is_refused_when_made(name: str) -> None:
    make, want = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=want):
        make()


def test_a_shard_without_a_logical_row_has_no_piece() -> None:
    assert shard_of((5, 3), Vocabulary(8), tp=4, tp_rank=3) == Shard(1, 6, ())
