"""The responses that a client listens to, from the messages that its bus hands over."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tidegate.codec import WireError, decode_response
from tidegate.types import JobId
from tidegate.v1.samples_pb2 import SampleGroup

CAPACITY = 16_384
"""The responses that wait for their listener, some two large iterations. Later ones are lost, which is harmless."""


class ResponseFeed:
    """`offer` never waits and never raises. The iteration ends at `end`."""

    def __init__(self, job: JobId) -> None:
        self._job = job
        self._waiting: asyncio.Queue[SampleGroup | None] = asyncio.Queue()
        self._has_ended = False

    def offer(self, payload: bytes) -> None:
        """Takes a message. Leaves out one that cannot be decoded, that is of another job, or that is one too many."""
        if self._waiting.qsize() >= CAPACITY:
            return
        with suppress(WireError):
            group = decode_response(payload)
            if group.job == self._job:
                self._waiting.put_nowait(group)

    def end(self) -> None:
        self._has_ended = True
        self._waiting.put_nowait(None)

    def __aiter__(self) -> ResponseFeed:
        return self

    async def __anext__(self) -> SampleGroup:
        group = None if self._has_ended else await self._waiting.get()
        if group is None:
            raise StopAsyncIteration
        return group
