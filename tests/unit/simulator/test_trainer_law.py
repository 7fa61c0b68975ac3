"""The trainer's law: against public throughputs, and how it saturates."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simulator.physics.trainer import ExpectedWork
from tests.unit.simulator.physics_cases import physics, trainer
from tidegate.types import Layout

RLINF = ExpectedWork(update_tokens=120e6 / 4, mean_tokens=14_600, context_tokens=18_500)
"""RLinf, figures 8 and 9: 7B, 115 to 125 M tokens an iteration of 8,192 responses, four updates (assumed)."""
AREAL = ExpectedWork(update_tokens=16e6, mean_tokens=8_000, context_tokens=11_000)
"""AReaL, figure 6a: assumed lengths; an update of this size hardly shows its end."""
DEMO = ExpectedWork(update_tokens=17e6, mean_tokens=8_000, context_tokens=10_500)


def rate_a_gpu(layout: Layout, work: ExpectedWork, model: str = "Qwen2.5-7B", hardware: str = "H100") -> float:
    """Tokens a second and GPU, updates included."""
    law = trainer(physics(model, hardware), work, layout)
    return work.update_tokens / (law.tokens_s(work.update_tokens, layout) + law.update_s(layout)) / layout.num_ranks


@pytest.mark.parametrize(("dp", "want"), [(16, 5300), (32, 4800), (64, 4000)])
def test_7b_has_rlinfs_throughput_on_64_to_256_h100(dp: int, want: float) -> None:
    assert rate_a_gpu(Layout(tp=4, dp=dp), RLINF) == pytest.approx(want, rel=0.06)


@pytest.mark.parametrize(
    ("model", "layout", "want"),
    [
        ("Qwen2.5-1.5B", Layout(dp=8), 427e12),
        ("Qwen2.5-7B", Layout(tp=2, dp=8), 455e12),
        ("Qwen2.5-32B", Layout(tp=4, pp=2, dp=8), 388e12),
    ],
)
def test_well_packed_passes_without_recompute_have_areals_flops_on_h800(
    model: str, layout: Layout, want: float
) -> None:
    law = trainer(physics(model, "H800", trainer={"recompute": False}), AREAL, layout)
    found = law.flops(AREAL.context_tokens) / law.tokens_s(1.0, layout) / layout.num_ranks
    assert found == pytest.approx(want, rel=0.15)


def test_a_model_with_experts_is_between_rlinf_and_the_ceiling_of_pre_training() -> None:
    """Qwen3-30B-A3B on 32 H100: RLinf 1.6k tokens a second and GPU, Megatron-Bridge 5.3k."""
    work = ExpectedWork(update_tokens=14e6 / 4, mean_tokens=9_500, context_tokens=12_000)
    assert 1600 < rate_a_gpu(Layout(dp=32, ep=8), work, "Qwen3-30B-A3B") < 5300


def test_log_probabilities_of_7b_have_rlinfs_rate() -> None:
    law = trainer(physics(), RLINF)
    assert law.inference_tokens_per_s == pytest.approx(19_200, rel=0.05)


def test_the_utilization_is_in_the_published_range() -> None:
    """0.20 to 0.30 on 6 flops a parameter for dense models."""
    law = trainer(physics(), DEMO)
    assert all(0.20 <= law.mfu(Layout(tp=4, dp=dp)) <= 0.30 for dp in (1, 2, 4, 8, 16, 32))


@pytest.mark.parametrize("work", [RLINF, DEMO])
def test_the_rate_saturates_with_the_replicas(work: ExpectedWork) -> None:
    """A doubling at a fixed update gives less each time: 1.5 to 1.85 in publications, from 64 GPUs on."""
    rates = [dp * rate_a_gpu(Layout(tp=4, dp=dp), work) for dp in (1, 2, 4, 8, 16, 32, 64, 128)]
    gains = [after / before for before, after in pairwise(rates)]
    assert gains == sorted(gains, reverse=True)
    assert max(gains) < 2
    assert 1.5 <= gains[4] <= 1.85
    assert gains[-1] < 1.6


def test_pipelines_wait_for_bubbles_which_chunks_shorten() -> None:
    law = trainer(physics(), DEMO)
    plain, piped, chunked = Layout(tp=4), Layout(tp=4, pp=4), Layout(tp=4, pp=4, vpp=7)
    num_micro_batches = DEMO.update_tokens / 32_768
    for layout, bubbles in ((piped, 3), (chunked, 3 / 7)):
        over = 4 * law.tokens_s(1.0, layout) / law.tokens_s(1.0, plain)
        assert over == pytest.approx(1 + bubbles / num_micro_batches)


def test_the_busiest_of_several_replicas_sets_the_pace_by_whole_micro_batches() -> None:
    even, uneven = trainer(physics(trainer={"straggler_micro_batches": 0}), DEMO), trainer(physics(), DEMO)
    for dp in (1, 4, 16):
        layout, num_micro_batches = Layout(tp=4, dp=dp), DEMO.update_tokens / dp / 32_768
        over = uneven.tokens_s(1.0, layout) / even.tokens_s(1.0, layout)
        assert over == pytest.approx(1 + (1 - 1 / dp) / num_micro_batches)


def test_tensor_parallelism_over_nodes_waits_for_the_network() -> None:
    law = trainer(physics(), DEMO)
    within, across = Layout(tp=8, dp=4), Layout(tp=16, dp=2)
    assert law.tokens_s(1.0, across) > 1.5 * law.tokens_s(1.0, within)
    assert law.tokens_s(1.0, Layout(tp=2, dp=8)) < law.tokens_s(1.0, Layout(tp=8, dp=2))


def test_an_update_exchanges_gradients_and_weights_over_the_replicas() -> None:
    law = trainer(physics(trainer={"update_s": 0}), DEMO)
    assert law.update_s(Layout(tp=4)) == 0
    moved = 6 * 7.615e9 / 4
    assert law.update_s(Layout(tp=4, dp=2)) == pytest.approx(0.5 * moved / 2 / (450e9 * 0.75), rel=0.001)
    assert law.update_s(Layout(tp=4, dp=16)) == pytest.approx(0.5 * moved * 15 / 16 / (50e9 * 0.75), rel=0.001)


def test_the_seconds_of_the_portions_add_up_and_long_sequences_cost_more() -> None:
    law, layout = trainer(physics(), DEMO), Layout(tp=4, dp=4)

    def seconds(*lengths: int) -> float:
        return law.tokens_s(sum(lengths), layout) * law.length_factor(lengths)

    assert seconds(1000, 20_000) == pytest.approx(seconds(1000) + seconds(20_000))
    assert seconds(20_000) > 1.1 * 20 * seconds(1000)
    assert law.length_factor([10_500]) == pytest.approx(1.0)


def test_no_layout_is_faster_than_the_most_of_the_allowed_ones() -> None:
    layouts = (Layout(tp=2, dp=1), Layout(tp=4, dp=4), Layout(tp=4, pp=2, dp=2))
    law = trainer(physics(), DEMO, *layouts)
    for layout in layouts:
        assert 1 / law.tokens_s(1.0, layout) <= law.most_rate(layout.num_ranks) * (1 + 1e-12)
    assert law.least_update_s == min(map(law.update_s, layouts))
    assert law.most_rate(8) == pytest.approx(8 * law.most_rate(1), rel=1e-12)
