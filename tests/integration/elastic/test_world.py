"""Epochs of real processes: groups, their cache, deaths, and leftover descriptors."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import RankServer

WORLDS = "tests.integration.elastic.world_ranks:"
TP2_PP2 = {"tp": 2, "pp": 2, "dp": 1, "cp": 1, "ep": 1}
DP4_EP2 = {"tp": 1, "pp": 1, "dp": 4, "cp": 1, "ep": 2}
TP2_CP2 = {"tp": 2, "pp": 1, "dp": 1, "cp": 2, "ep": 1}
DP3 = {"tp": 1, "pp": 1, "dp": 3, "cp": 1, "ep": 1}
MESHES = [(TP2_PP2, [3, 1, 0, 2]), (DP3, [1, 2, 3]), (TP2_CP2, [0, 3, 1, 2]), (DP4_EP2, [2, 1, 3, 0])]


@pytest.mark.parametrize(("victim", "num_elements"), [(2, 4), (1, 4_000_000)])
def test_survivors_of_a_kill_in_an_all_reduce_meet_in_the_next_epoch(
    ranks: RankServer, victim: int, num_elements: int
) -> None:
    arguments = {"victim": victim, "num_elements": num_elements}

    found = ranks.run(WORLDS + "a_member_dies", 4, arguments, expect_death=[victim])

    survivors = [rank for rank in range(4) if rank != victim]
    assert [int(found[rank]["total"]) for rank in survivors] == [sum(survivors)] * 3
    # The timeout is 20 s: a member that waits for it was not informed of the death.
    assert all(found[rank]["seconds"].shape == (2,) and found[rank]["seconds"][-1] < 15.0 for rank in survivors)


def test_an_abort_fails_the_members_that_wait_for_it_though_its_groups_are_referenced(
    ranks: RankServer,
) -> None:
    found = ranks.run(WORLDS + "one_aborts", 3)

    assert all(float(of_rank["seconds"]) < 15.0 for of_rank in found)
    assert [int(of_rank["total"]) for of_rank in found] == [3, 3, 3]


def test_an_absent_member_is_lost_at_the_timeout_and_may_join_the_next_epoch(ranks: RankServer) -> None:
    found = ranks.run(WORLDS + "one_is_late", 2)

    messages = [str(message) for message in found[0]["messages"]]
    assert messages[0].startswith("gathering from members (0, 1): a peer is dead or too late:")
    assert messages[1].startswith("member 0 joining epoch 2 of members (0, 1): a peer is dead or too late:")
    assert [int(of_rank["total"]) for of_rank in found] == [1, 1]


def test_members_join_leave_and_change_places_and_keep_their_ids(ranks: RankServer) -> None:
    found = ranks.run(WORLDS + "members_come_and_go", 4)

    want = ["0: 1:x", "2:xx 0: 1:x", "1:x 2:xx", "2:xx 1:x 0: 3:xxx"]
    assert [[str(text) for text in of_rank["seen"]] for of_rank in found] == [
        [want[0], want[1], want[3]],
        want,
        want[1:],
        want[3:],
    ]


@pytest.mark.parametrize("layout", [TP2_PP2, DP4_EP2, TP2_CP2], ids=["tp2pp2", "dp4ep2", "tp2cp2"])
def test_groups_are_those_of_megatron_s_parallel_state(ranks: RankServer, layout: dict[str, int]) -> None:
    arguments = {"layout": layout, "ranks": [0, 1, 2, 3]}

    want = ranks.run(WORLDS + "megatron_ranks", 4, arguments | {"own": False})
    found = ranks.run(WORLDS + "megatron_ranks", 4, arguments | {"own": True})

    for of_rank, want_of_rank in zip(found, want, strict=True):
        assert {role: of_rank[role].tolist() for role in want_of_rank} == {
            role: members.tolist() for role, members in want_of_rank.items()
        }


def test_groups_over_permuted_ranks_are_the_plain_groups_with_permuted_ranks(ranks: RankServer) -> None:
    places = [2, 0, 3, 1]

    straight = ranks.run(WORLDS + "megatron_ranks", 4, {"layout": TP2_PP2, "ranks": [0, 1, 2, 3], "own": True})
    permuted = ranks.run(WORLDS + "megatron_ranks", 4, {"layout": TP2_PP2, "ranks": places, "own": True})

    for index, rank in enumerate(places):
        for role, members in straight[index].items():
            want = [places[member] for member in members] if members.ndim else -1
            assert permuted[rank][role].tolist() == want, role


def test_groups_dropped_from_a_full_cache_are_made_again_by_all_their_members(ranks: RankServer) -> None:
    arguments = {"meshes": MESHES, "num_turns": 9}

    roomy = ranks.run(WORLDS + "meshes_in_turns", 4, arguments | {"max_groups": 64})
    full = ranks.run(WORLDS + "meshes_in_turns", 4, arguments | {"max_groups": 2})

    for of_rank, want_more in zip(full, roomy, strict=True):
        assert np.all(of_rank["used"][-1] < want_more["used"][-1])


def test_groups_from_the_cache_take_under_20_ms(ranks: RankServer) -> None:
    arguments = {"meshes": MESHES, "num_turns": 12, "max_groups": 64}

    found = ranks.run(WORLDS + "meshes_in_turns", 4, arguments)

    assert float(np.median([of_rank["seconds"][len(MESHES) :] for of_rank in found])) < 0.020


@pytest.mark.long
def test_200_turns_of_a_bounded_cache_leave_no_descriptor_and_no_thread(ranks: RankServer) -> None:
    arguments = {"meshes": MESHES, "num_turns": 200, "max_groups": 2}

    found = ranks.run(WORLDS + "meshes_in_turns", 4, arguments, timeout_s=200.0)

    for of_rank in found:
        assert of_rank["used"][196:].tolist() == of_rank["used"][4:8].tolist()


def test_epochs_leave_no_descriptor_and_no_thread(ranks: RankServer) -> None:
    found = ranks.run(WORLDS + "epochs", 2, {"num_epochs": 20})

    for of_rank in found:
        assert of_rank["used"][-1].tolist() <= of_rank["used"][2].tolist()
