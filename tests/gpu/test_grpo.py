"""One update on a CUDA device against the fp64 reference, on one rank and in layouts whose ranks share the device.

A world of one rank uses NCCL; ranks that share the device use gloo through host memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.megatron import small_job
from tests.integration.megatron.grpo_reference import (
    BF16_TOLERANCE,
    assert_same,
    distance,
    reference_of,
)
from tests.integration.megatron.logical_tensors import logical_tensors
from tests.ranks import RankServer

pytestmark = pytest.mark.gpu
ONE_UPDATE = "tests.integration.megatron.actor_trainer_ranks:one_update"
TOLERANCE = 1e-4
"""Relative, as in the test on CPUs. The sums of a GPU's kernels have another order."""
GRPO: dict[str, Any] = {"aggregation": "token-mean"}
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_gradient_are_those_of_the_formulas(ranks: RankServer, cuda: str, layout: dict[str, int]) -> None:
    num_ranks = 2 ** len(layout)
    got = ranks.run(ONE_UPDATE, num_ranks, {"layout": layout, "grpo": GRPO, "device": cuda})
    assert_same(got, reference_of(got, small_job.grpo_settings(**GRPO), tied=False), tolerance=TOLERANCE)


def test_loss_and_gradient_in_bf16_are_those_of_the_formulas_within_rounding(ranks: RankServer, cuda: str) -> None:
    got = ranks.run(ONE_UPDATE, 1, {"layout": {}, "grpo": GRPO, "device": cuda, "precision": "bf16"})
    want = reference_of(got, small_job.grpo_settings(**GRPO), tied=False)
    assert abs(float(got[0]["loss"]) - want.loss) <= BF16_TOLERANCE * want.absolute_terms
    for name, gradient in logical_tensors(got, "grad").items():
        assert distance(gradient, want.gradients[name]) <= BF16_TOLERANCE, name
