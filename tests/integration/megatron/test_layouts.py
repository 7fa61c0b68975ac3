"""Training is the same in every layout, and bitwise the same in the same layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import effort
from tests.integration.megatron import reference, small_job
from tests.integration.megatron.logical_tensors import logical_tensors
from tests.ranks import RankServer, Results
from tidegate.types import Layout

JOBS = "tests.integration.megatron.actor_trainer_ranks"
NUM_UPDATES = 20
ONE_UPDATE_TOLERANCE, CURVE_TOLERANCE = 1e-5, 1e-4
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
}
"""These are compared with a single rank, the sixth layout."""
BUSIEST = LAYOUTS["tp2 pp2 dp2"]
EXPERT_LAYOUTS: dict[str, dict[str, int]] = {
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "ep2 dp2": {"ep": 2, "dp": 2},
    "ep2 cp2": {"ep": 2, "cp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "pp2 vpp2 ep2 cp2": {"pp": 2, "vpp": 2, "ep": 2, "cp": 2},
}
"""Layouts of a model with experts and layers for virtual stages."""


@pytest.fixture(scope="module")
def single(ranks: RankServer) -> Results:
    return ranks.run(f"{JOBS}:updates", 1, {"layout": {}, "num_updates": NUM_UPDATES, "tied": True})[0]


@pytest.mark.parametrize("layout", effort.cases(LAYOUTS.values(), always=[BUSIEST]), ids=LAYOUTS)
def test_twenty_updates_follow_the_curve_of_one_rank(
    ranks: RankServer, single: Results, layout: dict[str, int]
) -> None:
    for got in ranks.run(
        f"{JOBS}:updates", num_ranks(layout), {"layout": layout, "num_updates": NUM_UPDATES, "tied": True}
    ):
        loss_error = np.abs(got["loss"] - single["loss"]) / single["absolute_terms"]
        norm_error = np.abs(got["grad_norm"] / single["grad_norm"] - 1)
        assert max(loss_error[0], norm_error[0]) <= ONE_UPDATE_TOLERANCE
        assert max(loss_error.max(), norm_error.max()) <= CURVE_TOLERANCE
        steps = [value for name, value in got.items() if name.startswith("state/step/")]
        assert steps
        assert all(value == NUM_UPDATES for value in steps)


@pytest.fixture(scope="module")
def single_with_experts(ranks: RankServer) -> Results:
    return ranks.run(f"{JOBS}:updates", 1, {"layout": {}, "num_updates": 2, "experts": True})[0]


@pytest.mark.parametrize(
    "layout",
    effort.cases(EXPERT_LAYOUTS.values(), always=[EXPERT_LAYOUTS["pp2 vpp2 ep2 cp2"]]),
    ids=EXPERT_LAYOUTS,
)
def test_updates_of_experts_and_virtual_stages_are_those_of_one_rank(
    ranks: RankServer, single_with_experts: Results, layout: dict[str, int]
) -> None:
    single = single_with_experts
    arguments = {"layout": layout, "num_updates": 2, "experts": True}
    for got in ranks.run(f"{JOBS}:updates", num_ranks(layout), arguments):
        loss_error = np.abs(got["loss"] - single["loss"]) / single["absolute_terms"]
        norm_error = np.abs(got["grad_norm"] / single["grad_norm"] - 1)
        assert max(loss_error.max(), norm_error.max()) <= ONE_UPDATE_TOLERANCE


def test_two_runs_of_a_seed_in_a_layout_end_in_the_same_bits(ranks: RankServer) -> None:
    arguments = {"layout": {"tp": 2, "dp": 2}, "num_updates": 3}
    first, second = (ranks.run(f"{JOBS}:updates", 4, arguments) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name, array in one.items():
            assert array.tobytes() == other[name].tobytes(), name


def test_another_seed_starts_from_other_weights(ranks: RankServer) -> None:
    first, second = (
        ranks.run(f"{JOBS}:updates", 1, {"layout": {}, "num_updates": 0, "seed": seed})[0] for seed in (0, 1)
    )
    name = "state/weight/decoder.layers.0.mlp.linear_fc1.weight"
    assert not np.array_equal(first[name], second[name])


@pytest.mark.parametrize(
    "layout",
    effort.cases([{}, *LAYOUTS.values()], always=[{"cp": 2}, BUSIEST]),
    ids=["one rank", *LAYOUTS],
)
def test_actor_and_inference_compute_the_same_bits_and_the_reference_the_same_numbers(
    ranks: RankServer, layout: dict[str, int]
) -> None:
    got = ranks.run(f"{JOBS}:scored", num_ranks(layout), {"layout": layout})
    whole = ranks.run(f"{JOBS}:one_update", 1, {"layout": {}, "grpo": {}})
    weights = {name: tensor.double() for name, tensor in logical_tensors(whole, "param").items()}
    by_actor = {name: values for rank in got for name, values in rank.items() if name.startswith("actor/")}
    samples = small_job.recorded_samples()
    assert len(by_actor) == len(samples), "each sequence must be scored on some rank"
    for rank in got:
        for name in rank:
            if name.startswith("actor/"):
                assert rank[name].tobytes() == rank[name.replace("actor/", "inference/")].tobytes()
    for index, sample in enumerate(samples):
        values = torch.from_numpy(by_actor[f"actor/{index}"][len(sample.prompt_tokens) :]).double()
        want = reference.response_log_probs(small_job.small_model(), weights, sample, small_job.TEMPERATURE)
        assert float((values - want).abs().max()) <= 1e-5


def test_the_ratio_is_exactly_one_where_the_policy_scored_the_samples_itself(ranks: RankServer) -> None:
    (got,) = ranks.run(f"{JOBS}:scored", 1, {"layout": {}})
    num_tokens = float(got["metric/num_tokens"])
    assert num_tokens > 100
    assert float(got["metric/ratio"]) == 1.0
    assert float(got["metric/kl"]) == 0.0
    assert float(got["metric/clip_fraction"]) == 0.0
    assert float(got["metric/mismatch_max"]) == 0.0


def num_ranks(layout: dict[str, int]) -> int:
    return Layout(**layout).num_ranks
