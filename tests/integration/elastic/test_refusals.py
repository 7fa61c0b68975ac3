"""A reshard that cannot be, or that fails a member before the decision, leaves the run as if it had not been asked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import RankServer

REFUSALS = "tests.integration.elastic.refusals:"
TRAINERS = "tests.integration.elastic.trainers:"
HOME = {"layout": {"tp": 2, "dp": 2}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows of the vocabulary do not divide": ({"layout": {"tp": 3}}, "64 padded vocabulary rows do not divide by tp=3"),
    "layers do not divide": ({"layout": {"pp": 3}}, "4 layers do not divide by pp * vpp = 3 * 1; legal pp"),
    "too few ranks": (
        {"layout": {"dp": 4}, "ranks": [0, 1, 2]},
        "needs tp * cp * dp * pp = 1 * 1 * 4 * 1 = 4 ranks and got 3",
    ),
    "more than there are": ({"layout": {"dp": 8}}, "1 * 1 * 8 * 1 = 8 ranks and got 4"),
    "a rank twice": ({"layout": {"dp": 2}, "ranks": [1, 1]}, "names a rank twice in (1, 1)"),
    "a rank that is no member": (
        {"layout": {"dp": 2}, "ranks": [0, 9]},
        "[9] are no members of epoch 1, which has (0, 1, 2, 3)",
    ),
    "experts that are not there": ({"layout": {"dp": 2, "ep": 2}}, "ep=2 and the model has no experts; legal ep: 1"),
    "the layout that it is": (HOME, "is the layout already"),
}


def test_a_layout_that_cannot_be_is_refused_with_the_equation_and_what_is_legal(ranks: RankServer) -> None:
    asked = [place for place, _ in REFUSED.values()]
    fixed = ranks.run(TRAINERS + "walks", 4, {"places": [HOME | {"updates": 2}]})

    for of_rank, want in zip(ranks.run(REFUSALS + "refused", 4, {"asked": asked}), fixed, strict=True):
        for said, (name, (_, words)) in zip(of_rank["said"].tolist(), REFUSED.items(), strict=True):
            assert said.startswith("LayoutRefused: "), name
            assert words in said, name
        assert of_rank["untouched"]
        assert of_rank["updates"].tolist() == want["updates"].tolist()


@pytest.mark.parametrize(
    ("point", "shared", "error"),
    [
        pytest.param("allocated", True, "ArenaFull: no room", marks=pytest.mark.long),
        ("allocated", False, "ArenaFull: no room"),
        ("transferred", True, "TransferFailed: no bytes"),
    ],
)
def test_what_fails_one_member_before_the_decision_aborts_the_reshard_on_all_and_training_goes_on(
    ranks: RankServer, point: str, shared: bool, error: str
) -> None:
    target = {"layout": {"pp": 2, "vpp": 2, "dp": 2}, "ranks": [3, 1, 0, 2]}
    arguments = {"member": 2, "point": point, "target": target, "shared": shared}
    fixed = ranks.run(TRAINERS + "walks", 4, {"places": [HOME | {"updates": 2}, target]})

    found = ranks.run(REFUSALS + "failing", 4, arguments)

    assert str(found[2]["said"]) == error
    for rank in (0, 1, 3):
        words = str(found[rank]["said"])
        assert words == f"ReshardAborted: the layout stays as it was: by members, what failed them: {{2: '{error}'}}"
    for of_rank, want in zip(found, fixed, strict=True):
        assert of_rank["untouched"].tolist() == [True, True, True]
        assert of_rank["updates"].tolist() == want["updates"].tolist()
