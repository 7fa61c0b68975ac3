"""A minibatch whose gradients a reshard carries ends with the update that it has without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests import effort
from tests.integration.elastic.trainer_ranks import updates_of
from tests.ranks import RankServer, Results

CARRIED = "tests.integration.elastic.carried_ranks:"
NUM_RANKS = 4
DP2 = {"layout": {"dp": 2}}
TP2 = {"layout": {"tp": 2}}
PP2 = {"layout": {"pp": 2}}


def at(portions: int, ranks: Sequence[int] | None = None, /, **layout: int) -> dict[str, Any]:
    return {"layout": layout, "portions": portions} | ({} if ranks is None else {"ranks": list(ranks)})


UNDISTURBED = [at(3)]
BACK = "two reshards at once, and back"
WALKS: dict[str, list[dict[str, Any]]] = {
    "dp1 to dp2": [at(1), at(2, dp=2)],
    BACK: [at(2, dp=2), at(0, tp=2), at(0, pp=2), at(1, dp=2)],
    "dp4 to tp2 dp2": [at(2, dp=4), at(1, [3, 1, 0, 2], tp=2, dp=2)],
    "tp2 to pp2 with newcomers and leavers": [at(2, [0, 1], tp=2), at(1, [3, 1], pp=2)],
    "two reshards with portions between": [at(1, dp=2), at(1, pp=2), at(1, [1, 2], tp=2)],
}
ALWAYS = ("dp4 to tp2 dp2", BACK)
LONG_WALKS: dict[str, list[dict[str, Any]]] = {
    "dp2 to dp1": [at(3, dp=2), at(0, [1])],
    "tp2 to pp2 on other ranks": [at(3, [0, 1], tp=2), at(0, [3, 2], pp=2)],
    "pp2 dp2 to dp2": [at(1, pp=2, dp=2), at(2, [2, 0], dp=2)],
    "interleaved stages": [at(2, tp=2, dp=2), at(1, pp=2, vpp=2, dp=2)],
    "context parallel": [at(2, cp=2), at(1, dp=4)],
}

Run = Callable[..., list[Results]]


@pytest.fixture(scope="module")
def run(ranks: RankServer) -> Run:
    """Each walk is made once."""
    made: dict[str, list[Results]] = {}

    def run_once(places: list[dict[str, Any]], **options: Any) -> list[Results]:
        call = {"places": places, **options}
        if repr(call) not in made:
            made[repr(call)] = ranks.run(CARRIED + "carried", NUM_RANKS, call, timeout_s=120.0)
        return made[repr(call)]

    return run_once


def moments_of(found: list[Results]) -> dict[str, npt.NDArray[np.float32]]:
    return {key: bits.view(np.float32) for key, bits in found[0].items() if key.startswith("moments/")}


def assert_same_update(got: list[Results], want: list[Results], *, rtol: float) -> None:
    """Losses, norms and the first moments, which have each gradient once. `rtol` is relative to a tensor's norm."""
    np.testing.assert_allclose(updates_of(got), updates_of(want), rtol=rtol)
    moments, wanted = moments_of(got), moments_of(want)
    assert moments.keys() == wanted.keys() != set()
    for key, moment in wanted.items():
        assert np.linalg.norm(moments[key] - moment) <= rtol * np.linalg.norm(moment), key


@pytest.mark.parametrize(
    "places",
    effort.cases([*WALKS.values(), *LONG_WALKS.values()], always=[WALKS[name] for name in ALWAYS]),
    ids=[*WALKS, *LONG_WALKS],
)
def test_an_update_of_carried_portions_is_that_of_an_undisturbed_trainer(
    run: Run, places: list[dict[str, Any]]
) -> None:
    found = run(places)

    assert_same_update(found, run(UNDISTURBED), rtol=1e-5)
    for of_rank in found:
        counts = np.cumsum([place["portions"] for place in places[:-1]])
        assert of_rank["reports"][:, 0].tolist() == counts.tolist()
        assert of_rank["reports"][:, 1].tolist() == of_rank["reports"][:, 2].tolist()


@pytest.mark.parametrize(
    ("walk", "options", "rtol"),
    [
        pytest.param("dp4 to tp2 dp2", {"shared": False}, 1e-5, id="sent"),
        pytest.param(
            "two reshards with portions between",
            {"shared": False, "tied": False},
            1e-5,
            id="sent, with embeddings of their own",
            marks=pytest.mark.long,
        ),
        pytest.param("two reshards with portions between", {"bf16": True}, 2e-2, id="bf16", marks=pytest.mark.long),
    ],
)
def test_portions_are_carried_in_every_precision_and_by_every_transport(
    run: Run, walk: str, options: dict[str, Any], rtol: float
) -> None:
    model = {name: value for name, value in options.items() if name != "shared"}
    assert_same_update(run(WALKS[walk], **options), run(UNDISTURBED, **model), rtol=rtol)


@pytest.mark.long
def test_portions_are_carried_with_experts(run: Run) -> None:
    places = [at(2, dp=2, ep=2), at(1, tp=2, dp=2, ep=2)]
    assert_same_update(run(places, experts=True), run(UNDISTURBED, experts=True), rtol=1e-5)


@pytest.mark.parametrize("name", effort.cases([BACK, "dp1 to dp2"], always=[BACK]))
def test_a_reshard_without_portions_takes_no_memory_for_gradients(run: Run, name: str) -> None:
    """Rank 0 has a file in each layout, and one more in each while portions are carried. None is left over."""
    assert run(WALKS[name])[0]["files"].tolist() == [4, 2, 2]


@pytest.mark.long
def test_carrying_many_times_leaks_nothing(ranks: RankServer) -> None:
    for of_rank in ranks.run(CARRIED + "carrying_often", NUM_RANKS, {"places": [DP2, TP2]}):
        assert of_rank["early"].tolist() == of_rank["late"].tolist()


@pytest.mark.long
def test_with_dropout_the_numbers_do_not_depend_on_what_was_built(run: Run) -> None:
    places = WALKS["two reshards with portions between"]
    fresh, visited = run(places, dropping_out=True), run(places, dropping_out=True, visited=True)
    assert updates_of(fresh).tolist() == updates_of(visited).tolist()


@pytest.mark.parametrize("point", effort.cases(["build", "allocated", "transferred"], always=["transferred"]))
def test_after_a_failure_of_one_member_the_minibatch_stays_open_in_the_old_layout(
    ranks: RankServer, run: Run, point: str
) -> None:
    call = {"point": point, "home": {"layout": {"tp": 2, "dp": 2}}, "target": PP2 | {"ranks": [1, 3]}}
    found = ranks.run(CARRIED + "failing", NUM_RANKS, call)

    np.testing.assert_allclose(updates_of(found), updates_of(run(UNDISTURBED)), rtol=1e-5)
    assert str(found[1]["error"]) == "TransferFailed: no bytes"
    assert all("{1: 'TransferFailed: no bytes'}" in str(found[rank]["error"]) for rank in (0, 2, 3))


def test_after_an_abort_the_minibatch_goes_on_and_is_carried_later(ranks: RankServer, run: Run) -> None:
    found = ranks.run(CARRIED + "aborted", NUM_RANKS, {"home": DP2, "target": TP2 | {"ranks": [2, 0]}})

    np.testing.assert_allclose(updates_of(found), updates_of(run(UNDISTURBED)), rtol=1e-5)
    # Layouts that a rank has left keep their file, and nothing keeps gradients.
    assert [int(of_rank["files"]) for of_rank in found] == [2, 1, 1, 0]


def test_other_portions_than_the_ranks_hold_are_refused_and_nothing_changes(ranks: RankServer, run: Run) -> None:
    found = ranks.run(CARRIED + "refused", NUM_RANKS, {"home": DP2, "target": TP2, "shards": None})

    np.testing.assert_allclose(updates_of(found), updates_of(run(UNDISTURBED)), rtol=1e-5)
    for of_rank in found:
        fewer, more = of_rank["errors"].tolist()
        assert fewer.startswith("PortionsRefused: the reshard is to carry 1 portions of (4,) samples")
        assert more.startswith("PortionsRefused: the reshard is to carry 3 portions of (4, 4, 4) samples")


def test_reproducible_mode_refuses_to_carry_and_nothing_changes(ranks: RankServer, run: Run) -> None:
    found = ranks.run(CARRIED + "refused", NUM_RANKS, {"home": DP2, "target": PP2, "shards": 4})

    np.testing.assert_allclose(updates_of(found), updates_of(run(UNDISTURBED)), rtol=1e-5)
    for of_rank in found:
        assert all("num_logical_shards=4" in error for error in of_rank["errors"].tolist())


def test_a_minibatch_whose_carried_portions_are_dropped_begins_anew(ranks: RankServer) -> None:
    found = ranks.run(CARRIED + "dropped", NUM_RANKS, {"home": DP2, "target": TP2})
    want = ranks.run(CARRIED + "fixed", NUM_RANKS, {"place": TP2, "first": 3})

    assert updates_of(found).tolist() == updates_of(want).tolist()
    assert [int(of_rank["files"]) for of_rank in found] == [2, 2, 0, 0]


def test_a_suspension_drops_carried_portions_and_their_memory(ranks: RankServer) -> None:
    found = ranks.run(CARRIED + "suspended", NUM_RANKS, {"home": DP2, "target": TP2})
    want = ranks.run(CARRIED + "fixed", NUM_RANKS, {"place": DP2, "first": 2})

    np.testing.assert_allclose(updates_of(found), updates_of(want), rtol=1e-5)
    assert [int(of_rank["files"]) for of_rank in found] == [1, 1, 0, 0]


def test_the_buffers_of_gradients_have_no_memory_during_a_reshard(ranks: RankServer) -> None:
    found = ranks.run(CARRIED + "buffers_in_reshards", NUM_RANKS, {"places": [DP2, TP2, DP2]})

    assert [bool(of_rank["before"]) for of_rank in found] == [True, True, False, False]
    assert [of_rank["during"].tolist() for of_rank in found] == [[0, 0], [0, 0], [], []]
