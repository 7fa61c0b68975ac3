"""Reads a job's events and offers their metrics to the outlets, for one start of the job.

It reads the stream without consuming messages, so it affects no other reader. Events before the start's own submission
belong to another tracker. This one reads them only for the evaluations that a resumed job keeps.

Invariant: a row is offered once. [test_tracker: events_of_its_own_start]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from tidegate.ports.bus import BusUnavailable, EventLog
from tidegate.tracking.metrics import IterationMetrics
from tidegate.tracking.outlet import Outlet
from tidegate.types import JobId
from tidegate.v1 import events_pb2

_AGAIN_S = 0.5
"""The pause before the next attempt to read from an unavailable bus."""


class Tracker:
    """A job's tracker. `boot` is that of the launcher, which submits the job."""

    def __init__(self, log: EventLog, job: JobId, outlets: Sequence[Outlet], *, boot: int) -> None:
        self._log = log
        self._job = job
        self._outlets = outlets
        self._boot = boot
        self._metrics = IterationMetrics()
        """The metrics of the last submitted start."""
        self._is_submitted = False
        self._at = 0

    async def follow(self) -> None:
        while True:
            with suppress(BusUnavailable):  # the bus comes back, or the launcher ends the run
                await self._read(follow=True)
            await asyncio.sleep(_AGAIN_S)

    async def rest(self) -> None:
        """Read the rest of the stream. Raises BusUnavailable."""
        await self._read(follow=False)

    async def _read(self, *, follow: bool) -> None:
        async for sequence, event in self._log.read(self._job, after_sequence=self._at, follow=follow):
            self._at = sequence
            self._take(event)

    def _take(self, event: events_pb2.Event) -> None:
        if event.HasField("job_submitted"):
            self._metrics = IterationMetrics(self._metrics.evaluations if event.job_submitted.resume else None)
            self._is_submitted = self._is_submitted or event.boot == self._boot
        row = self._metrics.take(event)
        if row is not None and self._is_submitted:
            for outlet in self._outlets:
                outlet.offer(row)
