"""Runs in which a member is killed, and the run in which nobody dies, to which they are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ranks import RankServer, Results

TRAINS_ON = "tests.integration.elastic.death_ranks:trains_on"
NUM_RANKS = 5
"""Four members and rank 0, which publishes the epochs."""
PLACES = [{"layout": {"dp": 2}, "ranks": [1, 2], "updates": 2}, {"layout": {"tp": 2}, "ranks": [2, 3], "updates": 2}]
REFUGE = {"dp": 2}
OLD, NEW = (
    "(Layout(tp=1, pp=1, dp=2, cp=1, ep=1, vpp=1), (1, 2))",
    "(Layout(tp=2, pp=1, dp=1, cp=1, ep=1, vpp=1), (2, 3))",
)


@pytest.fixture(scope="module")
def undisturbed(ranks: RankServer) -> list[Results]:
    return ranks.run(TRAINS_ON, NUM_RANKS, {"places": PLACES, "refuge": REFUGE})


def run_with_kill(ranks: RankServer, victim: int, **script: Any) -> list[Results]:
    """The results of rank 0, which publishes the epochs, then those of the members that live."""
    arguments = {"places": PLACES, "refuge": REFUGE, "victim": victim} | script
    found = ranks.run(TRAINS_ON, NUM_RANKS, arguments, expect_death=[victim])
    assert found[0]["leftover"].tolist() == []
    return [of_rank for rank, of_rank in enumerate(found) if rank != victim]


def updates_of(members: list[Results]) -> dict[int, list[float]]:
    """The updates by number, from the members that trained. A later one replaces an earlier one of the same number."""
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
