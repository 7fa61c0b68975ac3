"""Epochs are published one after another, and the end of an epoch wakes the members that wait in its store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistStoreError

from tidegate.elastic.epoch import epoch_store
from tidegate.elastic.epoch.coordinator import Coordinator, announce, next_membership
from tidegate.elastic.epoch.decision import Outcome, StoreDecision
from tidegate.elastic.epoch.epoch_store import EpochStore
from tidegate.elastic.epoch.world import Membership, epoch_prefix

TIMEOUT_S = 20.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connected(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def test_members_receive_each_epoch_after_theirs(store: TCPStore) -> None:
    coordinator = Coordinator(store)
    coordinator.publish([1, 2, 3])
    coordinator.publish([3, 1])

    found = [next_membership(connected(store), after=epoch, timeout_s=TIMEOUT_S) for epoch in (0, 1)]

    assert found == [Membership(1, (1, 2, 3)), Membership(2, (3, 1))]


def test_the_end_of_an_epoch_wakes_members_that_wait_in_its_store_with_the_reason(store: TCPStore) -> None:
    waiting = EpochStore(connected(store), 4, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(PrefixStore("epoch/4", waiting).get, "an address")
        began = time.monotonic()
        epoch_store.end(store, 4, "member 2 died")

        with pytest.raises(DistStoreError, match="epoch 4 has ended: member 2 died"):
            waits.result(timeout=TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_other_epochs_continue_and_an_ended_one_returns_its_keys(store: TCPStore) -> None:
    ended, running = (EpochStore(connected(store), epoch, timeout_s=TIMEOUT_S) for epoch in (1, 2))
    ended.set("outcome", "committed")
    epoch_store.end(store, 1, "member 2 died")
    running.set("key", "value")

    assert (ended.get("outcome"), running.get("key")) == (b"committed", b"value")


def test_an_ended_epoch_stays_ended_with_its_first_reason(store: TCPStore) -> None:
    epoch_store.end(store, 1, "member 2 died")
    epoch_store.end(store, 1, "member 3 died")

    for _ in range(2):
        with pytest.raises(DistStoreError, match="epoch 1 has ended: member 2 died"):
            EpochStore(connected(store), 1, timeout_s=TIMEOUT_S).get("an address")


def test_a_wait_in_an_epoch_s_store_ends_at_its_timeout(store: TCPStore) -> None:
    with pytest.raises(DistStoreError, match=r"\['key'\] were not set within 0.1 s in epoch 1"):
        EpochStore(connected(store), 1, timeout_s=0.1).get("key")


def open_reshard(store: TCPStore, *, epoch: int) -> StoreDecision:
    """The decision of an open reshard, as member 1 of members 1 and 2."""
    of_epoch = PrefixStore(epoch_prefix(epoch), store)
    announce(of_epoch, "1")
    return StoreDecision(of_epoch, "1", me=1, participants=(1, 2), timeout_s=TIMEOUT_S)


def test_the_end_of_an_epoch_aborts_the_reshard_that_is_open(store: TCPStore) -> None:
    coordinator = Coordinator(store)
    decision = open_reshard(store, epoch=coordinator.publish([1, 2]).epoch)
    decision.vote()

    want = Outcome(committed=False, reason="member 2 died")
    assert coordinator.end("member 2 died") == decision.outcome() == want


def test_a_committed_reshard_stays_committed_at_the_end_of_its_epoch(store: TCPStore) -> None:
    coordinator = Coordinator(store)
    decision = open_reshard(store, epoch=coordinator.publish([1]).epoch)
    StoreDecision(PrefixStore(epoch_prefix(1), store), "1", me=2, participants=(1, 2), timeout_s=TIMEOUT_S).vote()
    decision.vote()

    assert coordinator.end("member 2 died") == Outcome(committed=True)


def test_an_epoch_without_a_reshard_ends_without_an_outcome(store: TCPStore) -> None:
    coordinator = Coordinator(store)
    coordinator.publish([1, 2])

    assert coordinator.end("member 3 shall join") is None
