"""Actor workers through joins, starts, updates and reshards: their refusals, and training that equals a fixed run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from services.actor.arena_folder import file_system
from tests import effort
from tests.ranks import RankServer, Results

RANKS = "tests.integration.megatron.worker_ranks"
TOLERANCE = 1e-5
IN_LAYOUT = ((0, 1), (0, 1), (0, 1, 2, 3), (2, 3), (2, 3), (0,))
"""By update: the members with which `resized` trains."""


class Run(NamedTuple):
    memory: Path
    members: list[Results]


MEMORIES = effort.cases(["in shared memory", "each for itself"], always=["in shared memory"])


@pytest.fixture(scope="module", params=MEMORIES)
def run(request: pytest.FixtureRequest, ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("job")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as shared:
        memory = Path(shared) if request.param == "in shared memory" else folder
        yield Run(memory, ranks.run(f"{RANKS}:resized", 4, {"folder": str(folder), "memory": str(memory)}))


@pytest.fixture(scope="module")
def fixed(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = str(tmp_path_factory.mktemp("fixed"))
    return ranks.run(f"{RANKS}:fixed", 1, {"folder": folder, "memory": folder, "num_updates": len(IN_LAYOUT)})[0]


def test_a_resized_run_has_the_losses_of_a_fixed_one(run: Run, fixed: Results) -> None:
    want = fixed["losses"]
    assert len(set(want.tolist())) == len(want)
    for update, members in enumerate(IN_LAYOUT):
        for member in members:
            assert run.members[member]["losses"][update] == pytest.approx(want[update], abs=TOLERANCE), update


def test_an_update_that_the_state_includes_is_not_repeated_and_a_later_member_has_no_loss_of_it(run: Run) -> None:
    for member in run.members:
        repeated, losses = member["again"], member["losses"]
        assert np.array_equal(repeated, np.where(np.isnan(losses[2:4]), np.nan, losses[1:3]), equal_nan=True)


def test_members_on_slots_that_share_devices_have_the_same_losses_to_the_bit(
    run: Run, ranks: RankServer, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "memory": str(tmp_path), "slots_per_gpu": 2}
    shared = ranks.run(f"{RANKS}:resized", 4, arguments)
    assert [str(member["backend"]) for member in (*run.members, *shared)] == ["gloo"] * 4 + ["staged"] * 4
    for member, want in zip(shared, run.members, strict=True):
        np.testing.assert_array_equal(member["losses"], want["losses"])
        # In shared memory the first switch, which no rank leaves with, is proved after its report.
        certificates = zip(member["certificates"].tolist(), want["certificates"].tolist(), strict=True)
        assert all(one == other for one, other in certificates if one and other)


def test_all_members_report_the_same_about_a_reshard(run: Run) -> None:
    first, *others = run.members
    assert len(set(first["certificates"].tolist())) == len(first["certificates"]), "an update lies between two reshards"
    for other in others:
        assert np.array_equal(other["certificates"], first["certificates"])
        assert np.array_equal(other["moved"], first["moved"])


def test_shared_state_lies_in_memory_and_is_removed_with_its_members(run: Run) -> None:
    is_shared = file_system(run.memory, Path("/proc/self/mounts").read_text()) == "tmpfs"
    assert run.members[0]["files"].tolist() == (["epoch2-member0"] if is_shared else [])
    assert list(run.memory.glob("n*/state/*/epoch2*")) == []


def test_impossible_calls_are_refused_with_the_reason(run: Run) -> None:
    assert "legal pp with vpp=1: 1, 2" in str(run.members[1]["refusals"][0])
    assert "is not prepared here; open: given up" in str(run.members[0]["refusals"][1])
    strayed = str(run.members[0]["refusals"][-1])
    assert "update 1.0.5 follows 4 steps after 4 updates, and the state here is of 5 steps after 5 updates" in strayed
    standing_by, _, stale = run.members[3]["refusals"].tolist()
    assert standing_by == "member 3 stands by: the layout is on members (0, 1)"
    assert stale == "the state is of epoch 1, this is 2: reshard it first"


def test_portions_of_another_number_are_refused_and_those_of_an_update_have_the_loss_of_a_whole_minibatch(
    ranks: RankServer, fixed: Results, tmp_path: Path
) -> None:
    for member in ranks.run(f"{RANKS}:in_portions", 2, {"folder": str(tmp_path)}):
        assert member["losses"] == pytest.approx(fixed["losses"][:3], abs=TOLERANCE)
        never_begun, other_number, dropped = member["refusals"].tolist()
        assert "update 1.0.0 has 1 portions so far, and the gradients here are of 0" in never_begun
        assert "update 1.0.0 has 1 portions so far, and the gradients here are of 2" in other_number
        assert "update 1.0.1 has 1 portions so far, and the gradients here are of 0" in dropped


def test_an_update_whose_portions_several_layouts_train_has_the_loss_of_a_whole_minibatch(
    ranks: RankServer, fixed: Results, tmp_path: Path
) -> None:
    found = ranks.run(f"{RANKS}:carried_portions", 3, {"folder": str(tmp_path), "memory": str(tmp_path)})
    assert found[2]["losses"][:2] == pytest.approx(fixed["losses"][:2], abs=TOLERANCE)
    for member in found[:2]:
        # It starts from the weights that both updates made.
        assert member["losses"][2] == pytest.approx(fixed["losses"][2], abs=TOLERANCE)
    for member in found:
        assert "reshard others" in str(member["refusals"][0])


def test_members_that_lost_a_peer_in_a_reshard_report_it_and_train_in_the_next_epoch(
    ranks: RankServer, fixed: Results, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "memory": str(tmp_path)}
    for survivor in ranks.run(f"{RANKS}:standby_member_dies", 3, arguments, expect_death=[2])[:2]:
        prepared, aborted, trained = survivor["refusals"].tolist()
        assert "reshard given up" in prepared
        assert "this worker has left the epoch" in prepared
        for refusal in (aborted, trained):
            assert "this worker is in no epoch (reshard given up" in refusal
        assert survivor["losses"] == pytest.approx(fixed["losses"][:2], abs=TOLERANCE)


def test_a_member_killed_after_the_commit_is_replaced_in_the_layout_to_which_the_others_switched(
    ranks: RankServer, fixed: Results, tmp_path: Path
) -> None:
    found = ranks.run(f"{RANKS}:replaced_after_commit", 4, {"folder": str(tmp_path)}, expect_death=[1])
    assert [bool(found[member]["in_epoch"]) for member in (0, 2)] == [False, False]
    assert found[0]["losses"][0] == pytest.approx(fixed["losses"][0], abs=TOLERANCE)
    for member in (2, 3):
        assert found[member]["losses"][1] == pytest.approx(fixed["losses"][1], abs=TOLERANCE)


def test_the_state_can_be_read_again_after_a_member_and_its_replacement_are_killed(
    ranks: RankServer, fixed: Results, tmp_path: Path
) -> None:
    found = ranks.run(f"{RANKS}:replaced_twice", 4, {"folder": str(tmp_path)}, expect_death=[1, 3])
    assert found[0]["losses"] == pytest.approx(fixed["losses"][:2], abs=TOLERANCE)
    assert found[2]["losses"][1] == pytest.approx(fixed["losses"][1], abs=TOLERANCE)


def test_a_member_that_finds_no_server_of_an_epoch_s_store_joins_the_next_epoch(
    ranks: RankServer, fixed: Results, tmp_path: Path
) -> None:
    (found,) = ranks.run(f"{RANKS}:without_a_store", 1, {"folder": str(tmp_path)})
    assert "reaching the store of epoch 1: a peer is dead or too late" in str(found["refusal"])
    assert found["losses"] == pytest.approx(fixed["losses"][:1], abs=TOLERANCE)


@pytest.mark.parametrize("where", MEMORIES)
def test_a_suspended_worker_gives_its_memory_back_and_trains_on_from_the_host_s(
    ranks: RankServer, fixed: Results, tmp_path: Path, where: str
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as shared:
        memory = shared if where == "in shared memory" else str(tmp_path)
        found = ranks.run(f"{RANKS}:suspended", 3, {"folder": str(tmp_path), "memory": memory})

    for member in (0, 1):
        assert found[member]["losses"][0] == pytest.approx(fixed["losses"][0], abs=TOLERANCE)
        _, held_bytes, kept_bytes = found[member]["freed"][0].tolist()
        assert min(held_bytes, kept_bytes) > 0
        too_early, unknown, undecided, committed, suspended = found[member]["refusals"].tolist()
        assert "there is no state to suspend: start the trainer" in too_early
        assert unknown == "suspension unknown is not prepared here; open: none"
        assert undecided == "reshard undecided is not decided yet: commit or abort it before a suspension"
        assert committed == "suspension suspend is committed and cannot be aborted"
        assert suspended == "the state is in host memory alone: reshard it first"
    assert found[2]["losses"][1] == pytest.approx(fixed["losses"][1], abs=TOLERANCE)
    assert found[2]["freed"][0][2] == 0, "a standby has no state to keep"
