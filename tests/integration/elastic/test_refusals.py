"""A refused reshard, and one that fails before the decision, leave the run as if nobody had requested it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankServer, Results

REFUSALS = "tests.integration.elastic.refusal_ranks:"
TRAINERS = "tests.integration.elastic.trainer_ranks:"
HOME = {"layout": {"tp": 2, "dp": 2}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows of the vocabulary do not divide": ({"layout": {"tp": 3}}, "64 padded vocabulary rows do not divide by tp=3"),
    "layers do not divide": ({"layout": {"pp": 3}}, "4 layers do not divide by pp * vpp = 3 * 1; legal pp"),
    "too few ranks": (
        {"layout": {"dp": 4}, "ranks": [0, 1, 2]},
        "needs tp * cp * dp * pp = 1 * 1 * 4 * 1 = 4 ranks, and got 3",
    ),
    "more than there are": ({"layout": {"dp": 8}}, "1 * 1 * 8 * 1 = 8 ranks, and got 4"),
    "a rank twice": ({"layout": {"dp": 2}, "ranks": [1, 1]}, "names a rank twice in (1, 1)"),
    "a rank that is no member": (
        {"layout": {"dp": 2}, "ranks": [0, 9]},
        "[9] are not members of epoch 1, whose members are (0, 1, 2, 3)",
    ),
    "experts that are not there": ({"layout": {"dp": 2, "ep": 2}}, "ep=2 and the model has no experts; legal ep: 1"),
    "the layout that it is": (HOME, "is the layout already"),
}


TARGET: dict[str, Any] = {"layout": {"pp": 2, "vpp": 2, "dp": 2}, "ranks": [3, 1, 0, 2]}


@pytest.fixture(scope="module")
def fixed(ranks: RankServer) -> list[Results]:
    """Two updates in HOME and one in TARGET, and nothing is refused or fails."""
    return ranks.run(TRAINERS + "walks", 4, {"places": [HOME | {"updates": 2}, TARGET]})


def test_an_impossible_layout_is_refused_with_the_equation_and_the_legal_values(
    ranks: RankServer, fixed: list[Results]
) -> None:
    places = [place for place, _ in REFUSED.values()]

    for of_rank, want in zip(ranks.run(REFUSALS + "refused", 4, {"places": places}), fixed, strict=True):
        for error, (name, (_, words)) in zip(of_rank["errors"].tolist(), REFUSED.items(), strict=True):
            assert error.startswith("LayoutRefused: "), name
            assert words in error, name
        assert of_rank["unchanged"]
        assert of_rank["updates"].tolist() == want["updates"][:2].tolist()


@pytest.mark.parametrize(
    ("point", "shared", "error"),
    [
        pytest.param("allocated", True, "ArenaFull: no room", marks=pytest.mark.long),
        pytest.param("allocated", False, "ArenaFull: no room", marks=pytest.mark.long),
        ("transferred", True, "TransferFailed: no bytes"),
    ],
)
def test_a_failure_of_one_member_before_the_decision_aborts_the_reshard_on_all_and_training_continues(
    ranks: RankServer, fixed: list[Results], point: str, shared: bool, error: str
) -> None:
    arguments = {"member": 2, "point": point, "target": TARGET, "shared": shared}

    found = ranks.run(REFUSALS + "failing", 4, arguments)

    assert str(found[2]["error"]) == error
    for rank in (0, 1, 3):
        message = str(found[rank]["error"])
        assert message == f"ReshardAborted: the layout stays as it was: these members failed: {{2: '{error}'}}"
    for of_rank, want in zip(found, fixed, strict=True):
        assert of_rank["unchanged"].tolist() == [True, True, True]
        assert of_rank["updates"].tolist() == want["updates"].tolist()


def test_a_failure_of_one_member_while_it_builds_fails_all_and_leaves_nothing(ranks: RankServer) -> None:
    fixed = ranks.run(TRAINERS + "walks", 4, {"places": [HOME, TARGET]})

    found = ranks.run(REFUSALS + "failing_build", 4, {"member": 2, "target": TARGET})

    assert str(found[2]["error"]) == "ArenaFull: no room"
    for rank in (0, 1, 3):
        assert "these members failed: {2: 'ArenaFull: no room'}" in str(found[rank]["error"])
    for of_rank, want in zip(found, fixed, strict=True):
        assert of_rank["unchanged"].tolist() == [True, True, True]
        assert of_rank["updates"].tolist() == want["updates"].tolist()


def test_unreadable_files_leave_the_trainer_unstarted(ranks: RankServer, tmp_path: Path) -> None:
    found = ranks.run(REFUSALS + "unreadable_files", 4, {"folder": str(tmp_path)})

    errors = [str(of_rank["error"]) for of_rank in found]
    assert any("checksum" in error for error in errors)
    assert all(error.startswith(("FileCorrupt: ", "MemberFailed: ")) for error in errors)
    assert not any(of_rank["has_state"] for of_rank in found)
