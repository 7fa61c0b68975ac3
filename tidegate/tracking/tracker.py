"""Reads a job's events and offers what they say to the outlets, of one start of the job.

Invariants: it reads the stream and takes nothing from it, so that nobody notices how far it is; what was told before
the start's own submission is another tracker's, and read only for the evaluations that a resumed job keeps; a row is
offered once.
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
"""Pause before a bus that is away is asked again."""


class Tracker:
    """`boot` is the launcher's, which submits the job."""

    def __init__(self, log: EventLog, job: JobId, outlets: Sequence[Outlet], *, boot: int) -> None:
        self._log = log
        self._job = job
        self._outlets = outlets
        self._boot = boot
        self._metrics = IterationMetrics()
        """Of the start that was submitted last."""
        self._is_submitted = False
        self._at = 0

    async def follow(self) -> None:
        while True:
            with suppress(BusUnavailable):  # it comes back, or the launcher ends the run
                await self._read(follow=True)
            await asyncio.sleep(_AGAIN_S)

    async def rest(self) -> None:
        """What is on the stream now. BusUnavailable."""
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
