"""Decides a reshard in one place: each member votes, and a single key is written once, committed or aborted.

Order:
1. A member whose part of the new layout is ready votes prepared.
2. The last member to vote prepared writes committed.
3. A member that failed writes aborted with the reason. So does any process that sees a member die.

Invariants:
- The outcome is written by compare-and-set and never changes. [test_decision: a_committed_reshard_cannot_be_aborted]
- It is committed only after every participant voted prepared. [test_decision: one_failure_aborts_it_for_all]
- A member switches only on the outcome. A member that receives none in time tries to write aborted, so that all end
  alike. [test_decision: a_member_that_stays_silent]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

_OUTCOME = "outcome"
_COMMITTED = "committed"
_ABORTED = "aborted: "


@dataclass(frozen=True, slots=True)
class Outcome:
    committed: bool
    reason: str = ""
    """The reason of an abort: which member failed, and why."""


class Decision(Protocol):
    """The decision of one reshard."""

    def vote(self, failure: str = "") -> None:
        """Vote that this member is prepared, or that it failed."""
        ...

    def outcome(self) -> Outcome:
        """Wait for the outcome. It is the same for all members."""
        ...


class StoreDecision:
    """A decision in a torch store that outlives the members, such as the TCPStore of the membership epochs.

    `name` belongs to this reshard and was never used on this store before. After `timeout_s` an undecided reshard is
    aborted.
    """

    def __init__(self, store: Store, name: str, *, me: int, participants: Sequence[int], timeout_s: float) -> None:
        self._store = _of_reshard(store, name)
        self._me = me
        self._participants = tuple(participants)
        self._timeout = timedelta(seconds=timeout_s)

    def vote(self, failure: str = "") -> None:
        if failure:
            self._propose(f"{_ABORTED}member {self._me} failed: {failure}")
            return
        self._store.set(_vote_key(self._me), "prepared")
        if self._store.add("prepared", 1) == len(self._participants):
            self._propose(_COMMITTED)

    def outcome(self) -> Outcome:
        try:
            self._store.wait([_OUTCOME], self._timeout)
        except DistStoreError:
            silent = [member for member in self._participants if not self._store.check([_vote_key(member)])]
            # Avoid different outcomes: only the compare-and-set decides, here too.
            self._propose(f"{_ABORTED}members {silent} did not vote within {self._timeout.total_seconds():g} s")
        return _read(self._store.get(_OUTCOME))

    def _propose(self, outcome: str) -> None:
        self._store.compare_set(_OUTCOME, "", outcome)


def abort(store: Store, name: str, reason: str) -> Outcome:
    """Abort a reshard from outside, after a member's death. Returns the outcome, which may be committed already."""
    return _read(_of_reshard(store, name).compare_set(_OUTCOME, "", _ABORTED + reason))


def _of_reshard(store: Store, name: str) -> PrefixStore:
    return PrefixStore(f"reshard/{name}", store)


def _vote_key(member: int) -> str:
    return f"vote/{member}"


def _read(value: bytes) -> Outcome:
    text = value.decode()
    return Outcome(text == _COMMITTED, text.removeprefix(_ABORTED) if text != _COMMITTED else "")
