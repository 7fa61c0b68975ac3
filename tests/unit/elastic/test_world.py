"""Which groups a full cache drops, and which memberships are legal."""

from __future__ import annotations

import pytest

from tidegate.elastic.epoch.world import Membership, peers_needed, surplus


def test_the_least_recently_used_groups_are_dropped_until_no_member_has_too_many() -> None:
    recency = [(0, 1), (2, 3), (0,), (1, 2), (0, 2)]

    assert surplus(recency, keep=frozenset(), bound=2) == [(0, 1), (2, 3)]


def test_an_old_group_stays_when_its_members_have_room() -> None:
    recency = [(2, 3), (0, 1), (0,), (1,)]

    assert surplus(recency, keep=frozenset(), bound=1) == [(0, 1)]


def test_a_group_in_use_stays_though_a_member_has_too_many() -> None:
    assert surplus([(0, 1), (0,), (0, 2)], keep=frozenset({(0, 1)}), bound=1) == [(0,), (0, 2)]


@pytest.mark.parametrize("members", [(), (1, 2, 1)])
def test_a_membership_has_members_and_each_once(members: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="epoch 3 names members"):
        Membership(3, members)


def test_an_error_that_is_not_about_peers_passes_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), peers_needed("adding up"):
        raise RuntimeError("shapes differ")
