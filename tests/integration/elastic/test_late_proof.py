"""A switch that is proved beside the first micro-batches is as one that is checked before it, or it is undone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import effort
from tests.integration.elastic.killed_members import NUM_RANKS, REFUGE, TRAINS_ON, check_as_undisturbed, run_with_kill
from tests.ranks import RankServer

WALKS = "tests.integration.elastic.trainer_ranks:walks"
DAMAGED = "tests.integration.elastic.late_ranks:damaged"
USED = "tests.integration.elastic.late_ranks:used"
WALK: list[dict[str, Any]] = [
    {"layout": {"dp": 2}, "ranks": [1, 2]},
    {"layout": {"tp": 2, "dp": 2}},
    {"layout": {"pp": 2, "dp": 2}, "ranks": [3, 0, 2, 1]},
    {"layout": {"cp": 2}, "ranks": [3, 1]},
    {"layout": {"dp": 4}},
]
LEAVING = 2
"""The switch of the walk that ranks leave with."""
PLACES = [
    {"layout": {"dp": 2}, "ranks": [1, 2], "updates": 2},
    {"layout": {"tp": 2, "dp": 1}, "ranks": [2, 1], "updates": 2},
]
GROWING = [PLACES[0], {"layout": {"tp": 2, "dp": 2}, "ranks": [1, 2, 3, 4], "updates": 2}]


def test_a_late_proof_has_the_updates_and_certificates_of_an_early_one(ranks: RankServer) -> None:
    early = ranks.run(WALKS, 4, {"places": WALK})
    late = ranks.run(WALKS, 4, {"places": WALK, "late": True})

    for before, after in zip(early, late, strict=True):
        assert after["updates"].tobytes() == before["updates"].tobytes()
        assert after["moved"].tolist() == before["moved"].tolist()
        proved = [digest or want for digest, want in zip(after["proved"], before["certificates"], strict=True)]
        assert proved == before["certificates"].tolist()
        is_late = [not digest for digest in after["certificates"]]
        assert is_late == [number != LEAVING for number in range(len(WALK) - 1)]
    assert all(digest for digest in late[1]["proved"]), "member 1 is in every layout"
    for key in (key for key in early[0] if key.startswith("final/")):
        assert late[0][key].tobytes() == early[0][key].tobytes()


@pytest.mark.parametrize(
    ("carries", "by"), effort.cases([(False, 1.0), (True, 1.0), (False, float("nan"))], always=[(True, 1.0)])
)
def test_a_switch_with_a_wrong_element_is_undone_before_an_update_is_applied(
    ranks: RankServer, carries: bool, by: float
) -> None:
    found = ranks.run(DAMAGED, 4, {"member": 3, "carries": carries, "by": by})

    for of_rank in found:
        assert of_rank["undone"].tolist() == [True, True]
        assert int(of_rank["redone"]) == 0
        assert of_rank["left"].tolist() == []
    for member, of_rank in enumerate(found):
        assert "the switch to" in str(of_rank["error"]), member
        assert "CertificateMismatch" in str(of_rank["error"]), member
    updates = np.nanmean([of_rank["updates"] for of_rank in found], axis=0)
    assert np.isfinite(updates).all()


def test_whatever_uses_the_state_proves_the_switch_first(ranks: RankServer) -> None:
    for of_rank in ranks.run(USED, 4, {}):
        for name, (before, after) in of_rank.items():
            assert not before, f"{name} has nothing to prove"
            assert after, f"{name} left the switch without a proof"


@pytest.mark.parametrize(
    ("places", "victim", "point"),
    [
        pytest.param(GROWING, 3, "proving", id="in the target only, proving"),
        *(
            pytest.param(places, victim, point, marks=pytest.mark.long, id=f"{name}, {point}")
            for name, places, victim in (
                ("in both", PLACES, 2),
                ("standing by", PLACES, 3),
                ("in both, growing", GROWING, 2),
                ("in the target only", GROWING, 3),
            )
            for point in ("voted", "switched", "all_switched", "released", "proving", "compared")
            if (name, point) != ("in the target only", "proving")
            and not (name == "standing by" and point in ("proving", "compared"))
        ),
    ],
)
def test_a_death_before_the_proof_loses_nothing(
    ranks: RankServer, places: list[dict[str, Any]], victim: int, point: str
) -> None:
    call = {"places": places, "refuge": REFUGE, "late": True}
    undisturbed = ranks.run(TRAINS_ON, NUM_RANKS, call)

    _, *members = run_with_kill(ranks, victim, point=point, places=places, late=True)

    check_as_undisturbed(members, undisturbed)
