"""The one place where a reshard is decided: each member votes, and a single key says committed or aborted, once.

Order: a member that has its part of the new world ready votes prepared; the last of them to do so writes committed.
One that failed writes aborted with the reason, and so does whoever sees a member die. Invariants: the outcome is
written by compare-and-set and never changes; it is committed only after every participant voted prepared; nobody
switches on anything but the outcome, and who gets none in time tries to write aborted, so that all end alike.
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
    """Of an abort: whose failure it was."""


class Decision(Protocol):
    """One reshard's outcome."""

    def vote(self, failure: str = "") -> None:
        """This member is prepared, or could not be."""
        ...

    def outcome(self) -> Outcome:
        """Waits until it is decided; the same for all."""
        ...


class StoreDecision:
    """Over a torch store that outlives the members, such as the TCPStore of the membership epochs.

    `name` is the reshard's own, never used before on this store. Past `timeout_s` an undecided reshard is aborted.
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
            self._propose(f"{_ABORTED}members {silent} did not vote within {self._timeout.total_seconds():g} s")
        return _read(self._store.get(_OUTCOME))

    def _propose(self, outcome: str) -> None:
        self._store.compare_set(_OUTCOME, "", outcome)


def abort(store: Store, name: str, reason: str) -> Outcome:
    """End a reshard from outside, as whoever sees a member die does; the outcome, which may be committed already."""
    return _read(_of_reshard(store, name).compare_set(_OUTCOME, "", _ABORTED + reason))


def _of_reshard(store: Store, name: str) -> PrefixStore:
    return PrefixStore(f"reshard/{name}", store)


def _vote_key(member: int) -> str:
    return f"vote/{member}"


def _read(value: bytes) -> Outcome:
    text = value.decode()
    return Outcome(text == _COMMITTED, text.removeprefix(_ABORTED) if text != _COMMITTED else "")
