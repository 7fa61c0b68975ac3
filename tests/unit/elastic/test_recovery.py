"""The update from which a job continues, and the member that provides each rank's tensors."""

from __future__ import annotations

import pytest

from tidegate.elastic.plan.recovery import NUM_SLOTS, Origin, Recovery, StateLost, Version, choose_recovery, guardians

GUARDED = NUM_SLOTS
"""The first of the slots that a guardian keeps."""


def test_ranks_with_whole_tensors_provide_their_own() -> None:
    offers = {rank: [Version(rank, 7, None), Version(rank, 7, 1), Version(rank, 6, 0)] for rank in (3, 5)}

    assert choose_recovery((5, 3), offers) == Recovery(7, {5: Origin(5, None), 3: Origin(3, None)})


def test_all_ranks_return_to_the_newest_update_that_each_has_whole() -> None:
    offers = {
        0: [Version(0, 8, None), Version(0, 8, 0), Version(0, 7, 1)],
        1: [Version(1, 7, 1), Version(1, 6, 0)],
    }

    assert choose_recovery((0, 1), offers) == Recovery(7, {0: Origin(0, 1), 1: Origin(1, 1)})


def test_a_dead_rank_s_own_memory_serves_before_copies_and_the_lowest_member_reads_it() -> None:
    offers = {
        2: [Version(2, 4, None), Version(9, 4, 0), Version(9, 4, None)],
        1: [Version(9, 4, GUARDED), Version(9, 4, None)],
    }

    assert choose_recovery((2, 9), offers).origins[9] == Origin(1, None)


def test_a_guardian_s_copy_serves_where_nothing_else_survives() -> None:
    offers = {1: [Version(1, 4, None), Version(9, 4, GUARDED + 1), Version(9, 3, GUARDED)]}

    assert choose_recovery((1, 9), offers) == Recovery(4, {1: Origin(1, None), 9: Origin(1, GUARDED + 1)})


@pytest.mark.parametrize(
    "offers",
    [{0: [Version(0, 3, None)]}, {0: [Version(0, 3, None), Version(1, 2, None)]}, {}],
    ids=["nothing of one rank", "different updates", "nothing"],
)
def test_without_one_update_of_all_the_state_is_lost(offers: dict[int, list[Version]]) -> None:
    with pytest.raises(StateLost, match=r"no update survives whole .*return to the checkpoint"):
        choose_recovery((0, 1), offers)


@pytest.mark.parametrize(
    "hosts",
    [
        {0: "a", 1: "a", 2: "b", 3: "b"},
        {0: "a", 1: "b", 2: "a", 3: "c", 4: "b"},
        {4: "a", 0: "b"},
    ],
)
def test_copies_are_kept_on_another_host_where_no_host_has_more_than_half_of_the_ranks(hosts: dict[int, str]) -> None:
    guardian_of = guardians(hosts)

    assert sorted(guardian_of) == sorted(guardian_of.values()) == sorted(hosts)
    assert all(hosts[rank] != hosts[guardian] for rank, guardian in guardian_of.items())


@pytest.mark.parametrize("hosts", [dict.fromkeys(range(3), "a"), {0: "a", 1: "a", 2: "a", 3: "b"}])
def test_each_rank_has_one_guardian_that_is_not_itself_on_any_hosts(hosts: dict[int, str]) -> None:
    guardian_of = guardians(hosts)

    assert sorted(guardian_of) == sorted(guardian_of.values()) == sorted(hosts)
    assert all(rank != guardian for rank, guardian in guardian_of.items())


def test_a_single_rank_has_no_guardian() -> None:
    assert guardians({5: "a"}) == {}
