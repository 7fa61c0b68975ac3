"""Worlds whose ranks share a device. On CPUs the copies in host memory are those that shared GPUs would need."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import RankServer

STAGED = "tests.integration.elastic.staged_ranks:"


@pytest.mark.parametrize(
    ("slot_devices", "want"),
    [
        (["n0/cpu:0", "n0/cpu:0", "n0/cpu:1"], "staged"),
        (["n0/cpu:0", "n0/cpu:1", "n1/cpu:0"], "gloo"),
        ([None, None, None], "gloo"),
        (["n0/cpu:0"], "gloo"),
    ],
    ids=["two share one", "each has its own", "no slots", "one rank alone"],
)
def test_every_rank_chooses_the_backend_that_the_devices_of_all_need(
    ranks: RankServer, slot_devices: list[str | None], want: str
) -> None:
    found = ranks.run(STAGED + "backend", len(slot_devices), {"slot_devices": slot_devices})

    kind = "StagedGroup" if want == "staged" else "ProcessGroup"
    for of_rank in found:
        assert of_rank["backend"].tolist() == [want, want]
        assert of_rank["kinds"].tolist() == [kind, kind]
        assert of_rank["sums"].tolist() == [sum(range(len(slot_devices)))] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_those_of_gloo_to_the_bit(ranks: RankServer, dtype: str) -> None:
    plain = ranks.run(STAGED + "every_operation", 3, {"slot_device": None, "dtype": dtype})
    staged = ranks.run(STAGED + "every_operation", 3, {"slot_device": "n0/cpu:0", "dtype": dtype})

    assert [bool(of_rank.pop("is staged")) for of_rank in (*plain, *staged)] == [False] * 3 + [True] * 3
    for of_rank, want in zip(staged, plain, strict=True):
        assert of_rank.keys() == want.keys()
        for name, array in of_rank.items():
            np.testing.assert_array_equal(array, want[name], err_msg=name)


def test_what_is_received_arrives_at_the_wait_and_what_is_sent_may_change_after_the_call(ranks: RankServer) -> None:
    found = ranks.run(STAGED + "asynchronous", 2)

    assert [of_rank["before"].tolist() for of_rank in found] == [[2.0, 2.0], [4.0, 4.0]]
    assert [of_rank["after"].tolist() for of_rank in found] == [[6.0, 6.0]] * 2
    assert [of_rank["grad"].tolist() for of_rank in found] == [[2.0, 2.0]] * 2
    assert [of_rank["received"].tolist() for of_rank in found] == [[1.0, 1.0], [0.0, 0.0]]


def test_survivors_of_a_kill_in_a_staged_all_reduce_meet_in_the_next_epoch(ranks: RankServer) -> None:
    world = "tests.integration.elastic.world_ranks:a_member_dies"
    arguments = {"victim": 1, "num_elements": 4_000_000, "slot_device": "n0/cpu:0"}

    found = ranks.run(world, 3, arguments, expect_death=[1])

    assert [int(found[rank]["total"]) for rank in (0, 2)] == [2, 2]
    # The timeout is 20 s: a member that waits for it was not informed of the death.
    assert all(found[rank]["seconds"].shape == (2,) and found[rank]["seconds"][-1] < 15.0 for rank in (0, 2))


def test_staged_epochs_leave_no_descriptor_and_no_thread(ranks: RankServer) -> None:
    found = ranks.run("tests.integration.elastic.world_ranks:epochs", 2, {"num_epochs": 20, "slot_device": "n0/cpu:0"})

    for of_rank in found:
        assert of_rank["used"][-1].tolist() <= of_rank["used"][2].tolist()
