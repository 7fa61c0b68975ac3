"""A member is killed while it trains; the others go on in the next epoch, as the run does in which nobody dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.integration.elastic.survivors import APPLYING, FORWARD
from tests.ranks import RankServer, Results

TRAINS_ON = "tests.integration.elastic.survivors:trains_on"
NUM_RANKS = 5
"""Four members and rank 0, which says who is one."""
PLACES = [{"layout": {"dp": 2}, "ranks": [1, 2], "updates": 2}, {"layout": {"tp": 2}, "ranks": [2, 3], "updates": 2}]
REFUGE = {"dp": 2}
OLD, NEW = (
    "(Layout(tp=1, pp=1, dp=2, cp=1, ep=1, vpp=1), (1, 2))",
    "(Layout(tp=2, pp=1, dp=1, cp=1, ep=1, vpp=1), (2, 3))",
)
VICTIM = 2

DEATHS: dict[str, tuple[dict[str, Any], str]] = {
    "in a forward pass, with its memory kept by the node": (
        {"point": FORWARD, "dies_in": 1},
        "(2,) {2: 'the memory that its node kept'} 0 0",
    ),
    "in a forward pass, with a copy at a peer": (
        {"point": FORWARD, "dies_in": 1, "shared": False, "copies": "peer"},
        "(2,) {2: 'the copy that member 1 kept'} 0 0",
    ),
    "while an update is applied, with copies on the node": (
        {"point": APPLYING, "dies_in": 1, "copies": "node"},
        "(2,) {1: 'its own copy', 2: 'its own copy'} 0 0",
    ),
    "while an update is applied, with copies at peers": (
        {"point": APPLYING, "dies_in": 3, "shared": False, "copies": "peer"},
        # Member 3 needed nobody more, and had applied it.
        "(2,) {2: 'the copy that member 3 kept', 3: 'its own copy'} 1 8",
    ),
    "while an update is applied, with the last common copy two behind": (
        {"point": APPLYING, "dies_in": 3, "copies": "node", "copy_every": 4},
        "(2,) {2: 'its own copy', 3: 'its own copy'} 2 32",
    ),
    "in a switch that was committed, with a copy at a peer": (
        {"point": "switched", "shared": False, "copies": "peer"},
        "(2,) {2: 'the copy that member 3 kept'} 0 0",
    ),
}
IN_DEFAULT_SUITE = {
    "in a forward pass, with its memory kept by the node",
    "while an update is applied, with copies at peers",
}


@pytest.fixture(scope="module")
def undisturbed(ranks: RankServer) -> list[Results]:
    return ranks.run(TRAINS_ON, NUM_RANKS, {"places": PLACES, "refuge": REFUGE})


def killed(ranks: RankServer, victim: int, **script: Any) -> list[Results]:
    """What the members that are left found, after the rank that says who is one."""
    arguments = {"places": PLACES, "refuge": REFUGE, "victim": victim} | script
    found = ranks.run(TRAINS_ON, NUM_RANKS, arguments, expect_death=[victim])
    assert found[0]["left"].tolist() == []
    return [of_rank for rank, of_rank in enumerate(found) if rank != victim]


def updates_of(members: list[Results]) -> dict[int, list[float]]:
    """By number, of those that trained; the last word of each."""
    found: dict[int, list[float]] = {}
    for of_rank in members:
        found |= dict(zip(of_rank["numbers"].tolist(), of_rank["updates"].tolist(), strict=True))
    return found


def check_as_undisturbed(members: list[Results], undisturbed: list[Results]) -> None:
    want, got = updates_of(undisturbed[1:]), updates_of(members)
    assert sorted(got) == sorted(want) == list(range(4))
    np.testing.assert_allclose([got[n] for n in sorted(got)], [want[n] for n in sorted(want)], rtol=1e-4)
    for of_rank in members:
        assert of_rank["stale"].tolist() == []


@pytest.mark.parametrize(
    "death", [name if name in IN_DEFAULT_SUITE else pytest.param(name, marks=pytest.mark.long) for name in DEATHS]
)
def test_training_goes_on_after_a_death(ranks: RankServer, undisturbed: list[Results], death: str) -> None:
    script, want_report = DEATHS[death]

    _, *members = killed(ranks, VICTIM, **script)

    check_as_undisturbed(members, undisturbed)
    for of_rank in members:
        assert of_rank["reports"].tolist() == [want_report]
    # The timeout is 20 s: who waits for it has not been told.
    assert all(float(of_rank["seconds"]) < 10.0 for of_rank in members if not np.isnan(of_rank["seconds"]))


@pytest.mark.long
def test_state_that_is_lost_is_said_to_be_and_training_goes_on_from_the_checkpoint(
    ranks: RankServer, undisturbed: list[Results]
) -> None:
    _, *members = killed(ranks, VICTIM, point=APPLYING, dies_in=1, saves_after=1)

    check_as_undisturbed(members, undisturbed)
    for of_rank in members:
        assert str(of_rank["error"]).startswith("no update is left whole: by rank, the updates of which tensors")
        assert "{1: [], 2: []}" in str(of_rank["error"])
