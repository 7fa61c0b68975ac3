"""A layout that is built ahead is switched to as to a known one, with the bits of one that was not built ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import effort
from tests.integration.elastic.trainer_ranks import updates_of
from tests.ranks import RankServer, Results

RANKS = "tests.integration.elastic.ahead_ranks"
PLACES: list[dict[str, Any]] = [
    {"layout": {"dp": 2}, "ranks": [0, 1]},
    {"layout": {"dp": 4}},
    {"layout": {"pp": 2}, "ranks": [3, 2]},
    {"layout": {"dp": 2, "pp": 2}, "ranks": [2, 0, 3, 1]},
]
NUM_RANKS = 4
SHARDS = 4


@pytest.fixture(scope="module")
def not_ahead(ranks: RankServer) -> list[Results]:
    return ranks.run(f"{RANKS}:walk", NUM_RANKS, {"places": PLACES, "ahead": False, "shards": SHARDS})


@pytest.mark.parametrize(
    "shared", effort.cases([True, False], always=[True]), ids=["in shared memory", "in private memory"]
)
def test_a_layout_that_was_built_ahead_is_switched_to_as_to_a_known_one_with_the_same_bits(
    ranks: RankServer, not_ahead: list[Results], shared: bool
) -> None:
    arguments = {"places": PLACES, "ahead": True, "shards": SHARDS, "shared": shared}
    found = ranks.run(f"{RANKS}:walk", NUM_RANKS, arguments)

    assert [of_rank["was_built"].tolist() for of_rank in not_ahead] == [[False] * 3] * NUM_RANKS
    assert [of_rank["was_built"].tolist() for of_rank in found] == [[True] * 3] * NUM_RANKS
    assert np.array_equal(updates_of(found), updates_of(not_ahead))
    state = [key for key in not_ahead[0] if key.startswith("final/")]
    assert state
    assert [key for key in state if not np.array_equal(found[0][key], not_ahead[0][key])] == []


def test_a_switch_gives_back_the_memory_of_all_layouts_but_its_two(ranks: RankServer) -> None:
    found = ranks.run(f"{RANKS}:walk", NUM_RANKS, {"places": PLACES, "ahead": True})

    # The one in use, the last one, and the one that was built ahead; then the one in use and the last one.
    assert [of_rank["pages"].tolist() for of_rank in found] == [
        [[2, 2], [2, 1], [2, 1]],
        [[2, 2], [2, 1], [2, 1]],
        [[1, 1], [2, 2], [3, 2]],
        [[1, 1], [2, 2], [3, 2]],
    ]


def test_a_standby_that_dies_while_a_layout_is_built_ahead_costs_the_ranks_no_update_and_the_epoch_what_was_built(
    ranks: RankServer, not_ahead: list[Results]
) -> None:
    victim = 3
    arguments = {"layout": {"pp": 2}, "victim": victim, "survivors": [2, 0], "shards": SHARDS}
    found = ranks.run(f"{RANKS}:a_standby_dies", NUM_RANKS, arguments, expect_death=[victim])
    living = found[:victim]

    assert [int(of_rank["lost"]) for of_rank in living] == [1, 1, 1]
    assert [bool(of_rank["was_built"]) for of_rank in living] == [False] * 3
    assert np.array_equal(updates_of(living), updates_of(not_ahead)[:3])
