"""After kill -9 of any member at any point of a reshard, all survivors are in one layout, old or new, and continue."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.elastic.killed_members import (
    NEW,
    NUM_RANKS,
    OLD,
    PLACES,
    REFUGE,
    TRAINS_ON,
    check_as_undisturbed,
    run_with_kill,
    undisturbed,
)
from tests.ranks import RankServer, Results
from tidegate.elastic.carried_update import REDUCING
from tidegate.elastic.reshard_preparation import POINTS

__all__ = ["undisturbed"]

VICTIMS = {"the lowest, in the source only": 1, "in both layouts": 2, "in the target only": 3, "standing by": 4}
SECOND_PHASE = POINTS[POINTS.index("voted") :]
IN_DEFAULT_SUITE = {("in the target only", "switched")}
"""The kill before the decision is that of a reshard that carries gradients."""


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (victim, point) if (victim, point) in IN_DEFAULT_SUITE else pytest.param(victim, point, marks=pytest.mark.long)
        for victim in VICTIMS
        for point in POINTS
    ],
)
def test_a_kill_leaves_the_old_or_the_new_layout_and_training_continues(
    ranks: RankServer, undisturbed: list[Results], victim: str, point: str
) -> None:
    coordinator, *members = run_with_kill(ranks, VICTIMS[victim], point=point)

    check(coordinator, members, undisturbed, point=point)


@pytest.mark.long
@pytest.mark.parametrize("point", ["introduced", "transferring", "summed", "voted", "switched", "released"])
@pytest.mark.parametrize("copies", [{"shared": False, "copies": "peer"}, {"copies": "node"}], ids=["peer", "node"])
def test_a_kill_where_copies_are_kept_leaves_the_old_or_the_new_layout(
    ranks: RankServer, undisturbed: list[Results], copies: dict[str, Any], point: str
) -> None:
    coordinator, *members = run_with_kill(ranks, VICTIMS["in both layouts"], point=point, **copies)

    check(coordinator, members, undisturbed, point=point)


@pytest.mark.parametrize(
    "point",
    [
        REDUCING,
        *(
            pytest.param(point, marks=pytest.mark.long)
            for point in ("agreed", "introduced", "transferring", "voted", "switched")
        ),
    ],
)
def test_a_kill_while_gradients_are_carried_drops_them_and_the_minibatch_is_trained_again(
    ranks: RankServer, point: str
) -> None:
    call = {"places": PLACES, "refuge": REFUGE, "carries": True}
    undisturbed = ranks.run(TRAINS_ON, NUM_RANKS, call)

    coordinator, *members = run_with_kill(ranks, VICTIMS["in both layouts"], point=point, carries=True)

    assert_in_one_layout(coordinator, members, point=point)
    check_as_undisturbed(members, undisturbed)


def check(coordinator: Results, members: list[Results], undisturbed: list[Results], *, point: str) -> None:
    """`coordinator`: the results of rank 0. `point`: where a member died."""
    assert_in_one_layout(coordinator, members, point=point)
    # The certificate is that of the logical state, so it equals the undisturbed run's after as many updates.
    (want_certificate,) = undisturbed[1]["certificates"].tolist()
    for of_rank in members:
        certificates = of_rank["certificates"][of_rank["certified"] == 2]
        assert set(certificates.tolist()) <= {want_certificate}
    check_as_undisturbed(members, undisturbed)


def assert_in_one_layout(coordinator: Results, members: list[Results], *, point: str) -> None:
    """The new one if the reshard was committed. A member that dies at its vote may be seen before the others vote."""
    is_committed = bool(coordinator["committed"])
    assert [of_rank["meshes"].tolist() for of_rank in members] == [[NEW if is_committed else OLD]] * 3
    assert is_committed == (point in SECOND_PHASE) or point == "voted"
