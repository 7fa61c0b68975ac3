"""GRPO's loss and gradient against the fp64 reference, on one rank and on eight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.actor.grpo import GrpoSettings
from tests.integration.megatron import reference, small_job
from tests.integration.megatron.logical_tensors import logical_tensors
from tests.ranks import RankServer, Results

TOLERANCE = 1e-5
"""The loss is compared relative to the sum of |terms|, a gradient in L2. fp32 leaves about 1e-6 of either."""
BF16_TOLERANCE = 5e-2
"""The same measures; a bf16 weight has 8 bits."""

LAYOUTS = {"on one rank": {}, "on eight ranks, tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "mean over tokens": {"aggregation": "token-mean"},
    "mean over sequences of token means, ratio to the engine": {
        "aggregation": "seq-mean-token-mean",
        "old_log_probs": "engine",
    },
    "mean over sequences of token sums, truncated importance weights": {
        "aggregation": "seq-mean-token-sum",
        "importance_cap": 1.02,
    },
    "mean over sequences of token sums over the longest response, as Dr.GRPO": {
        "aggregation": "seq-mean-token-sum-norm"
    },
}


@pytest.mark.parametrize("tied", [False, True], ids=["two embeddings", "tied embeddings"])
@pytest.mark.parametrize("grpo", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_gradient_are_those_of_the_formulas(
    ranks: RankServer, layout: dict[str, int], grpo: dict[str, Any], tied: bool
) -> None:
    world_size = 8 if layout else 1
    got = ranks.run(
        "tests.integration.megatron.actor_trainer_ranks:one_update",
        world_size,
        {"layout": layout, "grpo": grpo, "tied": tied},
    )
    want = reference_of(got, small_job.grpo_settings(**grpo), tied=tied)
    assert want.clip_fraction > 0.05, "the samples must be off-policy enough to try the clipping"
    assert 0.2 < want.mismatch.get("mismatch_truncated", 0.5) < 0.8, "weights on both sides of the cap"
    assert_same(got, want)


@pytest.mark.parametrize("max_tokens", [24, 96], ids=["under a cap that most are over", "under a cap of several"])
def test_loss_and_gradient_under_a_token_cap_are_those_of_the_formulas(ranks: RankServer, max_tokens: int) -> None:
    grpo: dict[str, Any] = {"aggregation": "seq-mean-token-mean"}
    arguments = {"layout": {"pp": 2, "dp": 2}, "grpo": grpo, "max_tokens": max_tokens}
    got = ranks.run("tests.integration.megatron.actor_trainer_ranks:one_update", 4, arguments)
    assert_same(got, reference_of(got, small_job.grpo_settings(**grpo), tied=False))


def assert_same(got: list[Results], want: reference.Loss, *, tolerance: float = TOLERANCE) -> None:
    for rank in got:
        assert bool(rank["committed"])
        assert abs(float(rank["loss"]) - want.loss) <= tolerance * want.absolute_terms
        assert float(rank["metric/absolute_terms"]) == pytest.approx(want.absolute_terms, rel=tolerance)
        assert float(rank["metric/kl"]) == pytest.approx(want.kl, rel=tolerance)
        assert float(rank["metric/clip_fraction"]) == pytest.approx(want.clip_fraction)
        for name, figure in want.mismatch.items():
            assert float(rank[f"metric/{name}"]) == pytest.approx(figure), name
        norm = torch.cat([gradient.flatten() for gradient in want.gradients.values()]).norm()
        assert float(rank["grad_norm"]) == pytest.approx(float(norm), rel=tolerance)
    gradients = logical_tensors(got, "grad")
    assert gradients.keys() == want.gradients.keys()
    for name, gradient in gradients.items():
        assert distance(gradient, want.gradients[name]) <= tolerance, name


def test_loss_and_gradient_in_bf16_are_those_of_the_formulas_within_rounding(ranks: RankServer) -> None:
    grpo: dict[str, Any] = {"aggregation": "token-mean"}
    arguments = {"layout": {"tp": 2, "pp": 2, "dp": 2}, "grpo": grpo, "precision": "bf16"}
    got = ranks.run("tests.integration.megatron.actor_trainer_ranks:one_update", 8, arguments)
    want = reference_of(got, small_job.grpo_settings(**grpo), tied=False)
    for rank in got:
        assert bool(rank["committed"])
        assert abs(float(rank["loss"]) - want.loss) <= BF16_TOLERANCE * want.absolute_terms
    gradients = logical_tensors(got, "grad")
    errors = {name: distance(gradient, want.gradients[name]) for name, gradient in gradients.items()}
    assert {name: error for name, error in errors.items() if not error <= BF16_TOLERANCE} == {}
    assert max(errors.values()) > TOLERANCE, "it was computed in bf16"


def reference_of(got: list[Results], settings: GrpoSettings, *, tied: bool) -> reference.Loss:
    """The reference's loss for the ranks' parameters."""
    assert settings.max_new_tokens is not None
    return reference.grpo(
        small_job.small_model(tied=tied),
        logical_tensors(got, "param"),
        small_job.recorded_samples(),
        temperature=small_job.TEMPERATURE,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_coefficient=settings.kl_coefficient,
        aggregation=settings.aggregation.value,
        old_log_probs=settings.old_log_probs.value,
        importance_cap=settings.importance_cap,
        max_new_tokens=settings.max_new_tokens,
    )


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
