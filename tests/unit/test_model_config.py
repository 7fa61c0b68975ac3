"""A model's shape is valid when made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidegate.model_config import ModelConfig

SMALL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=192,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_seq_len=256,
)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers=0 must be at least 1"),
        ("vocab_size", -5, "vocab_size=-5 must be at least 1"),
        ("num_kv_heads", 4, "num_heads=6 does not divide by num_kv_heads=4; legal num_kv_heads: 1, 2, 3, 6"),
        ("head_dim", 15, "head_dim=15 is odd"),
        ("rope_theta", 0.0, "rope_theta=0.0 must be positive"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=nan must be positive"),
    ],
)
def test_a_shape_that_no_model_has_is_refused_with_the_numbers(field: str, value: float, message: str) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **fields)


def test_the_fused_projection_holds_every_query_key_and_value_row() -> None:
    assert SMALL.num_queries_per_group == 3
    assert SMALL.qkv_size == (6 + 2 + 2) * 16


@pytest.mark.parametrize("experts", [(4, None), (None, 2), (4, 0), (4, 5)])
def test_experts_are_named_with_how_many_a_token_goes_to(experts: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match=r"a token goes to 1 up to num_experts experts; a dense model sets neither"):
        replace(SMALL, num_experts=experts[0], experts_per_token=experts[1])
    assert replace(SMALL, num_experts=4, experts_per_token=4).num_experts == 4
