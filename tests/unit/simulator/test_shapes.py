"""Shapes by name: their published numbers of parameters and bytes of the KV cache."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from simulator.physics.shapes import SHAPES, ModelName, ShapeSection
from tidegate.types import Layout

PUBLISHED = {
    ModelName.QWEN25_1_5B: (1.54e9, 1.54e9, 28_672),
    ModelName.QWEN25_7B: (7.62e9, 7.62e9, 57_344),
    ModelName.QWEN25_32B: (32.8e9, 32.8e9, 262_144),
    ModelName.QWEN3_30B_A3B: (30.5e9, 3.35e9, 98_304),
    ModelName.QWEN3_235B_A22B: (235e9, 22.2e9, 192_512),
}
"""Parameters, active parameters and KV bytes a token, of the models' cards."""


def test_a_named_shape_has_the_published_number_of_parameters_and_kv_bytes() -> None:
    assert PUBLISHED.keys() == SHAPES.keys()
    for name, (parameters, active, kv_bytes) in PUBLISHED.items():
        shape = SHAPES[name]
        assert (shape.num_parameters, shape.active_parameters) == pytest.approx((parameters, active), rel=0.01), name
        assert shape.kv_bytes == kv_bytes, name


def test_reshards_move_a_dense_model_of_as_many_parameters_and_none_with_experts() -> None:
    model = SHAPES[ModelName.QWEN25_32B].reshard_model()
    assert model is not None
    assert model.num_parameters == pytest.approx(SHAPES[ModelName.QWEN25_32B].num_parameters, rel=0.001)
    assert model.refusal(Layout(tp=8, pp=2)) == ""
    assert SHAPES[ModelName.QWEN3_30B_A3B].reshard_model() is None


@pytest.mark.parametrize(
    ("wrong", "want"),
    [
        ({"num_kv_heads": 3}, "num_heads=28 does not divide by num_kv_heads=3"),
        ({"num_experts": 8}, "num_experts=8 with experts_per_token=0"),
        ({"num_experts": 8, "experts_per_token": 9}, "num_experts=8 with experts_per_token=9"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(wrong: dict[str, int], want: str) -> None:
    with pytest.raises(ValidationError, match=want):
        ShapeSection.model_validate(wrong)
