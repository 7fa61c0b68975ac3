"""The store's clock as the scheduler counts time: without the jumps that setting it makes.

- Between two reads it goes on by this machine's monotonic clock. That says whether a decision may be due; the decision
  itself has the time of its own read.
- A read that is further than JUMP_MS from that shows a jump: the store's clock was set, or this machine slept. From
  then on the jump is left out, so no deadline comes early or late by it.
- A scheduler that starts later goes on from the latest time in the state, where the store's clock is behind that. A
  clock that was set forth it takes as it is.

Leases go by the store's own clock: an instance that lost its lease by a jump joins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tidegate.ports.store import Leases

JUMP_MS = 5_000
"""Longer than an answer of the store is under way. A smaller jump moves a deadline by as much."""


def _loop_time_s() -> float:
    return asyncio.get_running_loop().time()


class StoreClock:
    """Unix milliseconds. `was_read` takes the time that another call brought, and returns what it is here."""

    def __init__(self, store: Leases, *, monotonic_s: Callable[[], float] = _loop_time_s) -> None:
        self._store = store
        self._monotonic_s = monotonic_s
        self._read: tuple[int, float] | None = None
        self._earliest_ms = 0
        self._left_out_ms = 0
        self._log = structlog.get_logger("clock")

    def goes_on_from(self, noted_ms: int) -> None:
        """Before the first read: the latest time that an earlier scheduler has noted."""
        self._earliest_ms = noted_ms

    async def now_ms(self) -> int:
        """The time of the last read, and what has passed here since. The first call reads."""
        return await self.read_ms() if self._read is None else self._gone_on(self._read)

    async def read_ms(self) -> int:
        return self.was_read(await self._store.now_unix_ms())

    def was_read(self, store_ms: int) -> int:
        now_ms = store_ms - self._left_out_ms
        expected_ms = max(now_ms, self._earliest_ms) if self._read is None else self._gone_on(self._read)
        if abs(jump_ms := now_ms - expected_ms) > JUMP_MS:
            self._log.warning("the store's clock has jumped", by_s=jump_ms / 1000)
            self._left_out_ms += jump_ms
            now_ms -= jump_ms
        self._read = now_ms, self._monotonic_s()
        return now_ms

    def _gone_on(self, read: tuple[int, float]) -> int:
        read_ms, read_s = read
        return read_ms + round((self._monotonic_s() - read_s) * 1000)
