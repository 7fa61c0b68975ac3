"""Who is in each membership epoch, said from outside of the members: by the service that serves their store.

Order at a death: the reshard that is open, if any, is aborted; the epoch ends, which wakes who waits in the store; the
next membership is published. Members that lose their epoch wait for the next one. Invariants: epochs are numbered one
after another and each is published once; an abort comes before the end, so that who is woken finds the outcome there;
a reshard that was committed stays so, whoever dies.
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
    """Over the members' store. One at a time; not a member itself."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._membership: Membership | None = None

    def publish(self, members: Sequence[int]) -> Membership:
        """The next epoch. Members that are not in it need not wait for another."""
        epoch = 1 if self._membership is None else self._membership.epoch + 1
        self._membership = Membership(epoch, tuple(members))
        self._store.set(_key(epoch), _MEMBERSHIP.dump_json(self._membership).decode())
        return self._membership

    def end(self, reason: str) -> Outcome | None:
        """End the epoch, as a member has died or others shall join; what came of its last reshard, None without one."""
        assert self._membership is not None
        epoch = self._membership.epoch
        of_epoch = PrefixStore(epoch_prefix(epoch), self._store)
        outcome = None
        if of_epoch.check([_OPEN]):
            outcome = decision.abort(of_epoch, of_epoch.get(_OPEN).decode(), reason)
        epoch_store.end(self._store, epoch, reason)
        return outcome


def announce(store: Store, name: str) -> None:
    """A member of the epoch of this store begins a reshard of this name, as all of them do."""
    store.set(_OPEN, name)


def next_membership(store: Store, *, after: int, timeout_s: float) -> Membership:
    """Wait until the epoch after this one is published. Raises torch's DistStoreError at the timeout."""
    store.wait([_key(after + 1)], timedelta(seconds=timeout_s))
    return _MEMBERSHIP.validate_json(store.get(_key(after + 1)))


def _key(epoch: int) -> str:
    return f"membership/{epoch}"
