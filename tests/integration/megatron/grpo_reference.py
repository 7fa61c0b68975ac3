"""Compares one update of some ranks with the fp64 reference of GRPO's loss and gradient."""

from __future__ import annotations

import pytest
import torch

from services.actor.grpo import GrpoSettings
from tests.integration.megatron import reference, small_job
from tests.integration.megatron.logical_tensors import logical_tensors
from tests.ranks import Results

TOLERANCE = 1e-5
"""The loss is compared relative to the sum of |terms|, a gradient in L2. fp32 leaves about 1e-6 of either."""
BF16_TOLERANCE = 5e-2
"""The same measures; a bf16 weight has 8 bits."""


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
