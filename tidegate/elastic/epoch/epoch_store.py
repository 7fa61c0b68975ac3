"""The store of one membership epoch. All waits in it end when the epoch ends.

Members wait in the store while they make groups. Without this class, a member that waits for a dead one would wait
until its timeout. The process that sees a member die calls `end`. Every wait of the epoch, those inside torch and gloo
too, then fails within NOTICE_S, with the reason.

Invariants:
- A key that exists can be read after the epoch's end too, because a decision must stay readable.
  [test_coordinator: an_ended_one_returns_its_keys]
- An epoch that has ended does not begin again. [test_coordinator: an_ended_epoch_stays_ended]
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

NOTICE_S = 0.02
"""The longest pause between two looks at the store. A pause is an eighth of the time waited so far, up to this value.

Polling is needed: only its timeout ends torch's own wait, and that wait then writes lines to stderr.
"""


class EpochStore(Store):
    """Wraps a store that outlives the members. Torch calls it through its C++ base, so the methods have torch's
    signatures.
    """

    def __init__(self, inner: Store, epoch: int, *, timeout_s: float) -> None:
        super().__init__()
        self._inner = inner
        self._epoch = epoch
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._inner.multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises DistStoreError at the timeout, or when the epoch ends."""
        began = time.monotonic()
        timeout_s = (self._timeout if timeout is None else timeout).total_seconds()
        while not self._inner.check(keys):
            waited_s = time.monotonic() - began
            if self._inner.check([_ended(self._epoch)]):
                reason = self._inner.get(_ended(self._epoch)).decode()
                raise DistStoreError(f"epoch {self._epoch} has ended: {reason}")
            if waited_s >= timeout_s:
                raise DistStoreError(f"{keys} were not set within {timeout_s:g} s in epoch {self._epoch}")
            time.sleep(min(waited_s / 8, NOTICE_S))


def end(store: Store, epoch: int, reason: str) -> None:
    """End all waits of this epoch, now and later. The first reason stays."""
    store.compare_set(_ended(epoch), "", reason)


def _ended(epoch: int) -> str:
    return f"ended/{epoch}"
