"""Publishes and ends the membership epochs. It runs in the service that serves the members' store, not in a member.

Order at a death:
1. An open reshard is aborted.
2. The epoch ends, which wakes all members that wait in the store.
3. The next membership is published. Members whose epoch ended wait for it.

Invariants:
- Epochs are numbered one after another, and each is published once. [test_coordinator: receive_each_epoch_after_theirs]
- An abort comes before the end, so that woken members find the outcome in the store.
  [test_coordinator: aborts_the_reshard_that_is_open]
- A committed reshard stays committed, whoever dies. [test_coordinator: a_committed_reshard_stays_committed]
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pydantic import TypeAdapter
from torch._C._distributed_c10d import PrefixStore, Store

from tidegate.elastic.epoch import decision, epoch_store
from tidegate.elastic.epoch.decision import Outcome
from tidegate.elastic.epoch.world import Membership, epoch_prefix

_OPEN = "reshard"
_MEMBERSHIP = TypeAdapter(Membership)


class Coordinator:
    """Works on the members' store. Only one coordinator runs at a time, and it is not a member."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._membership: Membership | None = None

    def publish(self, members: Sequence[int]) -> Membership:
        """Publish the next epoch. A process that is not among the members need not wait for another epoch."""
        epoch = 1 if self._membership is None else self._membership.epoch + 1
        self._membership = Membership(epoch, tuple(members))
        self._store.set(_key(epoch), _MEMBERSHIP.dump_json(self._membership).decode())
        return self._membership

    def end(self, reason: str) -> Outcome | None:
        """End the epoch, because a member has died or others shall join.

        Returns the outcome of its last reshard; None without a reshard.
        """
        assert self._membership is not None
        epoch = self._membership.epoch
        of_epoch = PrefixStore(epoch_prefix(epoch), self._store)
        outcome = None
        if of_epoch.check([_OPEN]):
            outcome = decision.abort(of_epoch, of_epoch.get(_OPEN).decode(), reason)
        epoch_store.end(self._store, epoch, reason)
        return outcome


def announce(store: Store, name: str) -> None:
    """A member of this store's epoch begins a reshard of this name. All members announce the same name."""
    store.set(_OPEN, name)


def next_membership(store: Store, *, after: int, timeout_s: float) -> Membership:
    """Wait until the epoch after this one is published. Raises torch's DistStoreError at the timeout."""
    store.wait([_key(after + 1)], timedelta(seconds=timeout_s))
    return _MEMBERSHIP.validate_json(store.get(_key(after + 1)))


def _key(epoch: int) -> str:
    return f"membership/{epoch}"
