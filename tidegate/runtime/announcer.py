"""How an instance tells what happened: its own events, published in the order in which they are told.

Invariant: an event told is on the stream, or `tell` raises; nothing is told from memory later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidegate.events import EventBody, EventSource
from tidegate.ports.bus import DeadLetter, EventLog
from tidegate.types import Grant, JobId
from tidegate.v1 import events_pb2


class Announcer:
    """One source's events of one job."""

    def __init__(self, log: EventLog, source: EventSource, job: JobId) -> None:
        self._log = log
        self._source = source
        self._job = job
        self._in_order = asyncio.Lock()

    async def tell(
        self,
        body: EventBody,
        *,
        incarnation: int,
        iteration: int = 0,
        transition_id: str = "",
        grants: Sequence[Grant] = (),
    ) -> int:
        """Publish; the event's sequence on the job's stream. BusUnavailable when the bus does not answer."""
        async with self._in_order:
            event = self._source.event(
                body,
                job=self._job,
                incarnation=incarnation,
                iteration=iteration,
                transition_id=transition_id,
                grants=grants,
            )
            return await self._log.publish(event)

    async def tell_dead_letter(self, letter: DeadLetter) -> None:
        """The hook of consumers: a message was set aside, and the job pauses."""
        body = events_pb2.DeadLettered(subject=letter.subject, reason=letter.reason, dead_letter=letter.id)
        await self.tell(body, incarnation=0)
