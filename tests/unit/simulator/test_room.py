"""The memory of a layout, against public figures, and its refusals."""

from __future__ import annotations

import pytest

from tests.unit.simulator.physics_cases import memory, physics
from tidegate.types import Layout

STATES = [
    ("Qwen2.5-1.5B", Layout(), 27.7),
    ("Qwen2.5-1.5B", Layout(dp=8), 11.6),
    ("Qwen2.5-7B", Layout(tp=2), 69),
    ("Qwen2.5-7B", Layout(tp=2, dp=16), 26),
    ("Qwen2.5-7B", Layout(tp=4), 34),
    ("Qwen2.5-7B", Layout(tp=4, dp=16), 13),
    ("Qwen2.5-32B", Layout(tp=8), 74),
    ("Qwen2.5-32B", Layout(tp=8, dp=2), 49),
    ("Qwen2.5-32B", Layout(tp=8, dp=16), 28),
]
"""GB of a rank before activations: 6 + 12 / dp bytes a parameter."""


@pytest.mark.parametrize(("model", "layout", "want_gb"), STATES)
def test_the_state_is_that_of_megatrons_distributed_optimizer(model: str, layout: Layout, want_gb: float) -> None:
    assert memory(physics(model)).of_trainer(layout).state / 1e9 == pytest.approx(want_gb, rel=0.03)


def test_activations_and_logits_are_the_published_ones_before_they_are_cut() -> None:
    """32B at 30k tokens keeps some 20 GB; its logits with the entropy take some 32 GB."""
    needs = memory(physics("Qwen2.5-32B", trainer={"micro_batch_tokens": 30_000}, memory={"logit_tokens": 40_000}))
    found = needs.of_trainer(Layout())
    assert found.activations / 1e9 == pytest.approx(20 + 30_000 * 5120 * 34 / 1e9, rel=0.02)
    assert found.logits / 1e9 == pytest.approx(32, rel=0.02)
    assert needs.of_trainer(Layout(tp=8)).logits == found.logits / 8


def test_a_layout_that_does_not_fit_is_refused_with_every_term_and_a_remedy() -> None:
    """32B at TP 8 with one copy does not fit 80 GB."""
    found = memory(physics("Qwen2.5-32B")).refusal(Layout(tp=8))
    assert found.startswith("layout tp8 needs 84.2 GB: 73.7 of state, 3.4 of activations, 1.1 of logits and 6.0 res")
    assert found.endswith("a GPU, which has 80.0: raise tp, pp or dp, or lower physics.trainer.micro_batch_tokens")
    assert memory(physics("Qwen2.5-32B", "H200")).refusal(Layout(tp=8)) == ""


def test_more_replicas_never_need_more_room_and_the_fewest_that_fit_are_found() -> None:
    room = memory(physics("Qwen2.5-32B"))
    totals = [room.of_trainer(Layout(tp=8, dp=dp)).total for dp in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)
    assert room.fewest_copies(Layout(tp=8, dp=4), most=4) == 2
    assert room.fewest_copies(Layout(tp=2, dp=4), most=16) is None


def test_experts_and_their_optimizer_divide_over_their_own_replicas() -> None:
    room = memory(physics("Qwen3-30B-A3B"))
    spread, whole = room.of_trainer(Layout(dp=8, ep=8)), room.of_trainer(Layout(dp=8))
    dense, experts = 1.53e9, 28.99e9
    assert whole.state == pytest.approx((6 + 12 / 8) * (dense + experts), rel=0.01)
    assert spread.state == pytest.approx((6 + 12 / 8) * dense + 18 * experts / 8, rel=0.01)


def test_an_engine_without_room_for_the_longest_sequence_is_refused_with_the_numbers() -> None:
    room = memory(physics("Qwen2.5-32B"))
    assert room.engine_refusal(2) == ""
    want = (
        "costs.engine.gpus_per_engine=1 has 68.0 GB a GPU for weights of 65.5 GB, which leaves its cache 9,439 tokens"
    )
    assert want in room.engine_refusal(1)
    assert "leaves its cache 0 tokens" in memory(physics("Qwen3-235B-A22B")).engine_refusal(4)


@pytest.mark.parametrize(("model", "want"), [("Qwen2.5-7B", 1), ("Qwen2.5-32B", 1), ("Qwen3-235B-A22B", 8)])
def test_a_copy_of_the_inference_has_the_fewest_gpus_that_hold_the_weights(model: str, want: int) -> None:
    assert memory(physics(model)).inference_copy_gpus() == want
