"""A trainer's refusals, its recovery from bad updates, and the sockets of its processes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import effort
from tests.ranks import RankServer

JOBS = "tests.integration.megatron.actor_trainer_ranks"
EIGHT_RANKS = {"tp": 2, "pp": 2, "dp": 2}


@pytest.mark.parametrize(
    "advantage",
    effort.cases([math.nan, 1e30], always=[1e30]),
    ids=["a loss that is not a number", "a finite loss whose gradient's norm overflows"],
)
def test_an_update_that_is_not_finite_changes_nothing_on_any_rank(ranks: RankServer, advantage: float) -> None:
    got = ranks.run(f"{JOBS}:poisoned_update", 8, {"layout": EIGHT_RANKS, "advantage": advantage})
    for rank in got:
        assert not rank["committed"]
        assert not np.isfinite(rank["grad_norm"])
        assert np.isfinite(rank["loss"]) == math.isfinite(advantage)
        assert rank["unchanged"]
        assert rank["next_committed"]
        assert np.isfinite(rank["next_loss"])


@pytest.mark.parametrize(
    "layout", effort.cases([{}, {"tp": 2, "pp": 2}], always=[{"tp": 2, "pp": 2}]), ids=["one rank", "tp2 pp2"]
)
def test_supervised_steps_learn_the_demonstrations(ranks: RankServer, layout: dict[str, int]) -> None:
    got = ranks.run(f"{JOBS}:supervised", 4 if layout else 1, {"layout": layout, "num_updates": 25})
    for rank in got:
        assert rank["loss"][0] == pytest.approx(math.log(61), rel=0.02), (
            "the untrained model is uniform over real tokens"
        )
        assert rank["loss"][-1] < 0.2 * rank["loss"][0]


@pytest.mark.parametrize(
    ("layout", "own_socket"),
    [(EIGHT_RANKS, False), ({}, True)],
    ids=["eight ranks on a passed socket", "one rank on its own socket"],
)
def test_no_rank_listens_beyond_loopback(ranks: RankServer, layout: dict[str, int], own_socket: bool) -> None:
    arguments = {"layout": layout, "own_socket": own_socket}
    got = ranks.run(f"{JOBS}:listening_addresses", 8 if layout else 1, arguments)
    addresses = {address for rank in got for address in rank["addresses"].tolist()}
    assert "127.0.0.1" in addresses, "the store and gloo must listen"
    assert addresses <= {"127.0.0.1", "::1"}


def test_no_rank_listens_after_its_world_has_ended(ranks: RankServer) -> None:
    for rank in ranks.run(f"{JOBS}:ended_world", 4, {"layout": {"tp": 2, "pp": 2}}):
        assert rank["during"] > 0
        assert rank["after"] == 0


def test_a_process_can_leave_one_layout_and_join_another(ranks: RankServer) -> None:
    for rank in ranks.run(f"{JOBS}:two_worlds", 4, {"first": {"tp": 2, "pp": 2}, "second": {"dp": 4}}):
        assert rank["norms"][1] == pytest.approx(rank["norms"][0], rel=1e-5)


def test_a_world_of_another_size_than_the_layout_is_refused_with_the_equation(ranks: RankServer) -> None:
    with pytest.raises(RuntimeError, match=r"tp2-pp2 needs tp \* pp \* dp \* cp = 4 ranks, the world has 2"):
        ranks.run(f"{JOBS}:ended_world", 2, {"layout": {"tp": 2, "pp": 2}})


def test_the_stand_in_answers_for_cuda_and_changes_nothing_else(ranks: RankServer) -> None:
    (got,) = ranks.run(f"{JOBS}:stand_in_facts", 1)
    want = {
        "installed": True,
        "same": True,
        "device": "cpu",
        "current_device": "cpu",
        "float_type": "torch.cuda.FloatTensor",
        "int_type": "torch.LongTensor",
        "cast": "torch.float64",
    }
    assert {name: value.item() for name, value in got.items()} == want
