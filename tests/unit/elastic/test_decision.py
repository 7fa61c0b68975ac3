"""A reshard has one outcome for all: committed only when all are prepared, aborted by the first failure."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import TCPStore

from tidegate.elastic.epoch.decision import Outcome, StoreDecision, abort

MEMBERS = (4, 0, 7)
COMMITTED = Outcome(committed=True)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def decisions(store: TCPStore, *, timeout_s: float = 20.0) -> list[StoreDecision]:
    """One per member, each over its own connection, as in separate processes."""
    return [
        StoreDecision(
            TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False),
            "1",
            me=member,
            participants=MEMBERS,
            timeout_s=timeout_s,
        )
        for member in MEMBERS
    ]


def outcomes(waiting: Sequence[StoreDecision]) -> list[Outcome]:
    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(lambda decision: decision.outcome(), waiting))


def test_a_reshard_is_committed_for_all_when_all_are_prepared(store: TCPStore) -> None:
    members = decisions(store)
    for member in members:
        member.vote()
    assert outcomes(members) == [COMMITTED] * 3


def test_one_failure_aborts_it_for_all_with_the_reason_before_the_others_vote(store: TCPStore) -> None:
    members = decisions(store)
    members[1].vote("no memory")
    want = Outcome(committed=False, reason="member 0 failed: no memory")
    assert outcomes(members[:2]) == [want] * 2
    members[0].vote()
    members[2].vote()
    assert outcomes(members) == [want] * 3


def test_a_death_seen_from_outside_aborts_a_reshard_at_once(store: TCPStore) -> None:
    members = decisions(store)
    members[0].vote()
    want = Outcome(committed=False, reason="member 7 died")
    assert abort(store, "1", "member 7 died") == want
    assert outcomes(members) == [want] * 3


def test_a_committed_reshard_cannot_be_aborted(store: TCPStore) -> None:
    members = decisions(store)
    for member in members:
        member.vote()
    assert abort(store, "1", "member 7 died") == COMMITTED
    members[0].vote("too late")
    assert outcomes(members) == [COMMITTED] * 3


def test_a_member_that_stays_silent_past_the_timeout_aborts_the_reshard_for_all(store: TCPStore) -> None:
    members = decisions(store, timeout_s=0.2)
    members[0].vote()
    members[2].vote()
    want = Outcome(committed=False, reason="members [0] did not vote within 0.2 s")
    assert outcomes(members) == [want] * 3
