"""Publishes the events of one instance, in the order of the calls.

- `publish` returns when the event is on the stream. While the bus is away, it waits and tries again, and later calls
  wait behind it. So no event is lost or out of order.
- When the stream is full, figures (progress, backlog, pictures of an iteration) are left out with a line in the log.
  For any other event `publish` raises StreamFull, and `until_unusable` too: whoever called it, its process cannot tell
  any more what it does. [test_announcer: a_full_stream_leaves]
- A stream that takes nothing more is unusable at once, also where only a figure was refused: each further one would
  take the bus's deadline. [test_announcer: takes_nothing_more]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import structlog

from tidegate.events import FIGURES, EventBody, EventSource
from tidegate.ports.bus import BusUnavailable, DeadLetter, EventLog, StreamFull, StreamStuck
from tidegate.types import Grant, JobId
from tidegate.v1 import events_pb2

RETRY_S = 1.0
"""The pause before the next try. Each try first waits for the bus's own deadline."""


class Announcer:
    """Publishes one source's events of one job."""

    def __init__(self, log: EventLog, source: EventSource, job: JobId) -> None:
        self._log = log
        self._source = source
        self._job = job
        self._in_order = asyncio.Lock()
        self._unusable: asyncio.Queue[StreamFull] = asyncio.Queue()
        self._logger = structlog.get_logger("announcer")

    async def publish(
        self,
        body: EventBody,
        *,
        incarnation: int,
        iteration: int = 0,
        transition_id: str = "",
        grants: Sequence[Grant] = (),
    ) -> int | None:
        """Publishes one event. Returns its sequence on the stream; None for a figure that was left out.

        StreamFull, unless the event is a figure."""
        async with self._in_order:
            event = self._source.event(
                body,
                job=self._job,
                incarnation=incarnation,
                iteration=iteration,
                transition_id=transition_id,
                grants=grants,
            )
            try:
                return await self._store(event)
            except StreamFull as full:
                is_figure = isinstance(body, FIGURES)
                if not is_figure or isinstance(full, StreamStuck):
                    self._unusable.put_nowait(full)
                if not is_figure:
                    raise
                self._logger.warning("figures left out", id=event.id, error=str(full))
                return None

    async def until_unusable(self) -> NoReturn:
        """Raises StreamFull once an event could not be published."""
        raise await self._unusable.get()

    async def _store(self, event: events_pb2.Event) -> int:
        while True:
            try:
                return await self._log.publish(event)
            except BusUnavailable as error:
                # A repeat has the same id and is stored once.
                self._logger.warning("event waits for the bus", id=event.id, error=str(error))
                await asyncio.sleep(RETRY_S)

    async def publish_dead_letter(self, letter: DeadLetter) -> None:
        """The hook of consumers: a message was set aside, so the job pauses."""
        body = events_pb2.DeadLettered(subject=letter.subject, reason=letter.reason, dead_letter=letter.id)
        await self.publish(body, incarnation=0)
