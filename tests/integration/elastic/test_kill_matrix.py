"""kill -9 of any member at each point of a reshard: all are in the old layout or all in the new one, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.elastic.killed_members import NEW, OLD, check_as_undisturbed, run_with_kill, undisturbed
from tests.ranks import RankServer, Results
from tidegate.elastic.preparing import POINTS

__all__ = ["undisturbed"]

VICTIMS = {"the lowest, in the source only": 1, "in both layouts": 2, "in the target only": 3, "standing by": 4}
SECOND_PHASE = POINTS[POINTS.index("voted") :]
IN_DEFAULT_SUITE = {("in both layouts", "introduced"), ("in the target only", "switched")}


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (victim, point) if (victim, point) in IN_DEFAULT_SUITE else pytest.param(victim, point, marks=pytest.mark.long)
        for victim in VICTIMS
        for point in POINTS
    ],
)
def test_a_kill_leaves_the_old_or_the_new_layout_and_training_goes_on(
    ranks: RankServer, undisturbed: list[Results], victim: str, point: str
) -> None:
    said, *members = run_with_kill(ranks, VICTIMS[victim], point=point)

    check(said, members, undisturbed, point=point)


@pytest.mark.long
@pytest.mark.parametrize("point", ["introduced", "transferring", "summed", "voted", "switched", "released"])
@pytest.mark.parametrize("copies", [{"shared": False, "copies": "peer"}, {"copies": "node"}], ids=["peer", "node"])
def test_so_does_one_where_copies_are_kept(
    ranks: RankServer, undisturbed: list[Results], copies: dict[str, Any], point: str
) -> None:
    said, *members = run_with_kill(ranks, VICTIMS["in both layouts"], point=point, **copies)

    check(said, members, undisturbed, point=point)


def check(said: Results, members: list[Results], undisturbed: list[Results], *, point: str) -> None:
    """`said` by the rank that says who is a member; `point`, at which one died."""
    want = NEW if point in SECOND_PHASE else OLD
    assert [of_rank["meshes"].tolist() for of_rank in members] == [[want]] * 3
    assert int(said["committed"]) == (point in SECOND_PHASE)
    # The certificate is of the logical state: that of the run in which nobody died, after as many updates.
    (want_certificate,) = undisturbed[1]["certificates"].tolist()
    for of_rank in members:
        certificates = of_rank["certificates"][of_rank["certified"] == 2]
        assert set(certificates.tolist()) <= {want_certificate}
    check_as_undisturbed(members, undisturbed)
