"""Which layouts fit the family, and the size of the padded vocabulary."""

from __future__ import annotations

import pytest

from tidegate.megatron.family import check_layout, legal_sizes, padded_vocab_size
from tidegate.model_config import ModelConfig
from tidegate.types import Layout

MODEL = ModelConfig(
    num_layers=6,
    hidden_size=32,
    ffn_hidden_size=96,
    num_heads=12,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=61,
    max_seq_len=64,
)
PADDED_VOCAB = 64

MISFITS = {
    "query heads": (Layout(tp=8), "num_heads % tp = 12 % 8 = 4, must be 0; legal tp: 1, 2, 4"),
    "key and value heads": (Layout(tp=3), "num_kv_heads % tp = 4 % 3 = 1, must be 0; legal tp: 1, 2, 4"),
    "layers": (Layout(pp=4), "num_layers % pp = 6 % 4 = 2, must be 0; legal pp: 1, 2, 3, 6"),
    "context parallelism": (Layout(cp=2), "context parallelism needs Transformer Engine; legal cp: 1"),
    "experts": (Layout(dp=2, ep=2), "the family has no experts; legal ep: 1"),
}


@pytest.mark.parametrize(("layout", "want"), MISFITS.values(), ids=MISFITS)
def test_a_layout_that_does_not_fit_is_refused_with_the_equation_and_the_legal_sizes(layout: Layout, want: str) -> None:
    with pytest.raises(ValueError, match="does not fit") as refusal:
        check_layout(MODEL, layout, padded_vocab=PADDED_VOCAB)
    assert want in str(refusal.value)
    assert str(layout) in str(refusal.value)


def test_a_vocabulary_padded_for_other_layouts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded vocabulary % tp = 62 % 4 = 2, must be 0; legal tp: 1, 2$"):
        check_layout(MODEL, Layout(tp=4), padded_vocab=62)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_every_size_that_is_called_legal_fits(axis: str) -> None:
    sizes = legal_sizes(MODEL, axis, padded_vocab=PADDED_VOCAB)
    assert len(sizes) > 1
    for size in sizes:
        check_layout(MODEL, Layout(**{axis: size}), padded_vocab=PADDED_VOCAB)


@pytest.mark.parametrize(
    ("tp_sizes", "want"), [((1,), 61), ((2,), 62), ((1, 2, 4), 64), ((2, 3), 66)], ids=["1", "2", "1 2 4", "2 3"]
)
def test_the_padded_vocabulary_divides_by_every_tp_of_the_job(tp_sizes: tuple[int, ...], want: int) -> None:
    assert padded_vocab_size(MODEL, tp_sizes) == want
