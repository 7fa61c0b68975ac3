"""A member is killed while it trains. The others continue in the next epoch, like the run in which nobody dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.integration.elastic.death_ranks import APPLYING, FORWARD
from tests.integration.elastic.killed_members import check_as_undisturbed, run_with_kill, undisturbed
from tests.ranks import RankServer, Results

__all__ = ["undisturbed"]

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
        # Member 3 needed no peer any more, and had applied the update.
        "(2,) {2: 'the copy that member 3 kept', 3: 'its own copy'} 1 8",
    ),
    "while an update is applied, with the last common copy two behind": (
        {"point": APPLYING, "dies_in": 3, "copies": "node", "copy_every": 4},
        "(2,) {2: 'its own copy', 3: 'its own copy'} 2 16",
    ),
    "in a forward pass on a device, with copies on the node": (
        {"point": FORWARD, "dies_in": 1, "shared": False, "hosted": True, "copies": "node"},
        "(2,) {2: 'its own copy'} 0 0",
    ),
    "in a switch that was committed, with a copy at a peer": (
        {"point": "switched", "shared": False, "copies": "peer"},
        "(2,) {2: 'the copy that member 3 kept'} 0 0",
    ),
}
IN_DEFAULT_SUITE = {
    "in a forward pass, with its memory kept by the node",
    "while an update is applied, with copies at peers",
    "in a forward pass on a device, with copies on the node",
}


@pytest.mark.parametrize(
    "death", [name if name in IN_DEFAULT_SUITE else pytest.param(name, marks=pytest.mark.long) for name in DEATHS]
)
def test_training_continues_after_a_death(ranks: RankServer, undisturbed: list[Results], death: str) -> None:
    script, want_report = DEATHS[death]

    _, *members = run_with_kill(ranks, VICTIM, **script)

    check_as_undisturbed(members, undisturbed)
    for of_rank in members:
        assert of_rank["reports"].tolist() == [want_report]
    # The timeout is 20 s: a member that waits for it was not informed of the death.
    assert all(float(of_rank["seconds"]) < 10.0 for of_rank in members if not np.isnan(of_rank["seconds"]))


@pytest.mark.long
def test_lost_state_is_reported_and_training_continues_from_the_checkpoint(
    ranks: RankServer, undisturbed: list[Results]
) -> None:
    _, *members = run_with_kill(ranks, VICTIM, point=APPLYING, dies_in=1, saves_after=1)

    check_as_undisturbed(members, undisturbed)
    for of_rank in members:
        assert str(of_rank["error"]).startswith(
            "no update survives whole on every rank: by rank, the updates whose tensors"
        )
        assert "{1: [], 2: []}" in str(of_rank["error"])
