"""GRPO's loss and gradient against the fp64 reference, on one rank and on eight."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests import effort
from tests.integration.megatron import small_job
from tests.integration.megatron.grpo_reference import BF16_TOLERANCE, TOLERANCE, assert_same, distance, reference_of
from tests.integration.megatron.logical_tensors import logical_tensors
from tests.ranks import RankServer

LAYOUTS: dict[str, dict[str, int]] = {"on one rank": {}, "on eight ranks, tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2}}
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
QUICK = [*product(["on one rank"], SETTINGS), ("on eight ranks, tp2 pp2 dp2", "mean over tokens")]


@pytest.mark.parametrize("tied", effort.cases([False, True], always=[True]), ids=["two embeddings", "tied embeddings"])
@pytest.mark.parametrize(("layout", "setting"), effort.cases(product(LAYOUTS, SETTINGS), always=QUICK))
def test_loss_and_gradient_are_those_of_the_formulas(ranks: RankServer, layout: str, setting: str, tied: bool) -> None:
    sizes, grpo = LAYOUTS[layout], SETTINGS[setting]
    world_size = 8 if sizes else 1
    got = ranks.run(
        "tests.integration.megatron.actor_trainer_ranks:one_update",
        world_size,
        {"layout": sizes, "grpo": grpo, "tied": tied},
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
