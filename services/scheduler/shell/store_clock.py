"""The store's clock between two reads of it: a call that reads something else brings its time along.

It says whether a decision may be due. The decision itself has the time of its own read.
"""

from __future__ import annotations

import asyncio

from tidegate.ports.store import Leases


class StoreClock:
    """Unix milliseconds. `was_read` takes the time that another call brought."""

    def __init__(self, store: Leases) -> None:
        self._store = store
        self._read: tuple[int, float] | None = None

    async def now_ms(self) -> int:
        """The time of the last read, and what has passed here since. The first call reads."""
        if self._read is None:
            return await self.read_ms()
        read_ms, read_s = self._read
        return read_ms + int((asyncio.get_running_loop().time() - read_s) * 1000)

    async def read_ms(self) -> int:
        self.was_read(await self._store.now_unix_ms())
        assert self._read is not None
        return self._read[0]

    def was_read(self, now_ms: int) -> None:
        self._read = now_ms, asyncio.get_running_loop().time()
