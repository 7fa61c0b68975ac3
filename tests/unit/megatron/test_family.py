"""Which layouts fit the family, and the size of the padded vocabulary."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from tidegate.megatron.family import check_layout, legal_sizes, padded_vocab_size
from tidegate.megatron.gpt_provider import GptProvider
from tidegate.megatron.packing import PAD_MULTIPLE
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
    "layers of virtual stages": (
        Layout(pp=2, vpp=2),
        "num_layers % (vpp * pp) = 6 % (2 * 2) = 2, must be 0; legal pp: 3",
    ),
    "virtual stages that fit no pipeline": (
        Layout(pp=2, vpp=6),
        "% (vpp * pp) = 6 % (6 * 2) = 6, must be 0; legal pp: none",
    ),
    "slices of a row": (Layout(cp=3), "positions of a row % (2 * cp) = 8 % (2 * 3) = 2, must be 0; legal cp: 1, 2, 4"),
    "experts": (Layout(dp=2, ep=2), "the model has no experts; legal ep: 1"),
}
EXPERTS = replace(MODEL, num_experts=6, experts_per_token=2)
EXPERT_MISFITS = {
    "the number of experts": (Layout(dp=4, ep=4), "num_experts % ep = 6 % 4 = 2, must be 0; legal ep: 1, 2"),
    "the ranks that share experts": (Layout(dp=2, ep=3), "dp * cp % ep = 2 % 3 = 2, must be 0; legal ep: 1, 2"),
    "positions under sequence parallelism": (
        Layout(tp=4, cp=4),
        "positions of a row % (cp * tp) = 8 % (4 * 4) = 8, must be 0; legal tp: 1, 2",
    ),
}


@pytest.mark.parametrize(
    ("model", "layout", "want"),
    [*((MODEL, *case) for case in MISFITS.values()), *((EXPERTS, *case) for case in EXPERT_MISFITS.values())],
    ids=[*MISFITS, *EXPERT_MISFITS],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_equation_and_the_legal_sizes(
    model: ModelConfig, layout: Layout, want: str
) -> None:
    with pytest.raises(ValueError, match="does not fit") as refusal:
        check_layout(model, layout, padded_vocab=PADDED_VOCAB)
    assert want in str(refusal.value)
    assert str(layout) in str(refusal.value)


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_a_check_accepts_what_the_trainer_builds_where_rows_can_be_cut(model: ModelConfig) -> None:
    provider = GptProvider(model, PADDED_VOCAB)
    sizes = itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 6), (1, 2, 3))
    counts = Counter[bool]()
    for tp, pp, dp, cp, ep, vpp in sizes:
        if vpp > 1 and pp == 1:
            continue
        layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=vpp)
        can_cut = PAD_MULTIPLE % (2 * cp) == 0 and (model is MODEL or PAD_MULTIPLE % (cp * tp) == 0)
        want = can_cut and not _refuses(provider.mesh, layout, tuple(range(layout.num_ranks)))
        got = not _refuses(partial(check_layout, padded_vocab=PADDED_VOCAB), model, layout)
        assert got == want, layout
        counts[want] += 1
    assert min(counts.values()) > 40


def _refuses(check: Callable[..., object], *arguments: object) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return True
    return False


def test_a_vocabulary_padded_for_other_layouts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded vocabulary % tp = 62 % 4 = 2, must be 0; legal tp: 1, 2$"):
        check_layout(MODEL, Layout(tp=4), padded_vocab=62)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_every_size_that_is_called_legal_fits(axis: str) -> None:
    sizes = legal_sizes(EXPERTS, Layout(dp=6), axis, padded_vocab=PADDED_VOCAB)
    assert len(sizes) > 1
    for size in sizes:
        check_layout(EXPERTS, Layout(**{"dp": 6, axis: size}), padded_vocab=PADDED_VOCAB)


@pytest.mark.parametrize(
    ("tp_sizes", "want"), [((1,), 61), ((2,), 62), ((1, 2, 4), 64), ((2, 3), 66)], ids=["1", "2", "1 2 4", "2 3"]
)
def test_the_padded_vocabulary_divides_by_every_tp_of_the_job(tp_sizes: tuple[int, ...], want: int) -> None:
    assert padded_vocab_size(MODEL, tp_sizes) == want
