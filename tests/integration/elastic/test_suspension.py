"""A job is suspended: its state is in host memory alone. It goes on in any layout on any members, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import effort
from tests.integration.elastic.trainer_ranks import updates_of
from tests.ranks import RankServer, Results

RANKS = "tests.integration.elastic.suspension_ranks"
WALKS = "tests.integration.elastic.trainer_ranks:walks"
PLACES: list[dict[str, Any]] = [
    {"layout": {"dp": 2}, "ranks": [0, 1]},
    {"layout": {"dp": 2}, "ranks": [0, 1]},
    {"layout": {"dp": 2, "pp": 2}},
    {"layout": {"pp": 2}, "ranks": [3, 2]},
    {"layout": {"dp": 4}},
]
"""The second is the first: a job often comes back to where it was."""
NUM_RANKS = 4
MEMORIES: dict[str, dict[str, bool]] = {
    "its tensors in shared memory": {},
    "its tensors in private memory": {"shared": False},
    "its tensors in private memory, kept in files": {"shared": False, "keeps_files": True},
}


@pytest.fixture(scope="module")
def never_suspended(ranks: RankServer) -> Results:
    arguments = {"places": [{"layout": {"dp": 1}}], "shards": 4, "updates_between": len(PLACES)}
    return ranks.run(WALKS, NUM_RANKS, arguments)[0]


IN_PRIVATE = "its tensors in private memory"


@pytest.mark.parametrize("memory", effort.cases(MEMORIES, always=[name for name in MEMORIES if name != IN_PRIVATE]))
def test_a_job_that_was_suspended_has_the_bits_of_one_that_never_was(
    ranks: RankServer, never_suspended: Results, memory: str
) -> None:
    arguments = {"places": PLACES, "shards": 4} | MEMORIES[memory]
    found = ranks.run(f"{RANKS}:suspended_between", NUM_RANKS, arguments)

    assert np.array_equal(updates_of(found), never_suspended["updates"])
    state = {key for key in never_suspended if key.startswith("final/")}
    assert [key for key in state if not np.array_equal(found[0][key], never_suspended[key])] == []
    # Each byte goes once to each rank that does not hold it, as in a reshard of a job at work.
    moved = found[0]["moved"].tolist()
    assert all(done == minimum for done, minimum in moved)
    assert moved[0] == [0, 0]
    certificates = np.stack([of_rank["certificates"] for of_rank in found])
    assert (certificates == certificates[0]).all()
    assert found[0]["left"].tolist() == []


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_suspended_job_gives_its_memory_back(ranks: RankServer, memory: str) -> None:
    arguments = {"places": PLACES[:3]} | MEMORIES[memory]
    found = ranks.run(f"{RANKS}:suspended_between", NUM_RANKS, arguments)

    for member in found[:2]:
        for (gradients, tensors, _), (gradients_kept, tensors_kept, _) in zip(
            member["training"].tolist(), member["resting"].tolist(), strict=True
        ):
            assert gradients > 0
            assert tensors > 0
            assert gradients_kept == 0
            assert (tensors_kept == 0) == (memory != "its tensors in shared memory")
    in_files = {name: found[0][name][:, 2] for name in ("training", "resting")}
    match memory:
        case "its tensors in shared memory":
            # The files are the host memory that keeps the state. A layout that was left keeps none.
            assert (in_files["resting"] > 0).all()
            assert (in_files["resting"] <= in_files["training"]).all()
        case "its tensors in private memory":
            assert not in_files["resting"].any()
        case _:
            assert not in_files["training"].any()
            assert (in_files["resting"] > 0).all()


def test_a_suspended_job_trains_on_only_after_a_reshard(ranks: RankServer) -> None:
    found = ranks.run(f"{RANKS}:suspended_between", NUM_RANKS, {"places": PLACES[:2]})
    assert {refusal for member in found for refusal in member["refusals"].tolist()} == {
        "the job is suspended: call reshard, in any layout, and continue then"
    }


def test_a_member_that_cannot_keep_its_state_leaves_all_in_the_old_layout(ranks: RankServer) -> None:
    found = ranks.run(f"{RANKS}:one_cannot_keep", 2)
    assert "File exists" in str(found[1]["error"])
    for member in found:
        assert not member["is_offered"]
        assert member["kept_bytes"] == 0
    assert found[0]["is_same"]


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name != "its tensors in private memory"])
def test_a_member_that_dies_while_the_job_is_suspended_costs_nothing(
    ranks: RankServer, never_suspended: Results, memory: str
) -> None:
    arguments = {"victim": 2, "shards": 4} | MEMORIES[memory]
    found = ranks.run(f"{RANKS}:keeper_dies", NUM_RANKS, arguments, expect_death=[2])
    living = [found[rank] for rank in (0, 1, 3)]

    # The dead member's first two updates are those of member 1.
    assert np.array_equal(updates_of(living), never_suspended["updates"][:4])
    for member in living:
        assert str(member["report"]) == "(2,) {2: 'the memory that its node kept'} 2"


def test_state_that_a_dead_member_kept_in_private_memory_is_lost_and_said_to_be(ranks: RankServer) -> None:
    arguments = {"victim": 2, "shards": 4, "shared": False}
    found = ranks.run(f"{RANKS}:keeper_dies", NUM_RANKS, arguments, expect_death=[2])
    for rank in (0, 1, 3):
        assert "no update survives whole on every rank: by rank" in str(found[rank]["error"])
        assert "{1: [2], 2: []}" in str(found[rank]["error"])
