"""Copies of jobs' states in the streams of their events: the last message on its subject, the place first.

A copy is in the stream that it is a copy of, so that one is never there without the other.
"""

from __future__ import annotations

from tidegate.adapters import subjects
from tidegate.adapters.nats_consumer import full_or_refused
from tidegate.adapters.nats_link import NatsLink, NatsRefused
from tidegate.ports.bus import BusLimits, StateCopy
from tidegate.types import JobId

ROLL_UP = {"Nats-Rollup": "sub"}
"""The server stores the message and drops those before it on the subject, in one step."""


class NatsStateCopies:
    def __init__(self, link: NatsLink, limits: BusLimits) -> None:
        self._link = link
        self._limits = limits

    async def keep(self, job: JobId, copy: StateCopy) -> None:
        payload, stream = subjects.copy_payload(copy), subjects.events_stream(job)
        self._link.check_size(payload, what=f"the state of job {job}", remedy="use fewer GPUs in one job")
        try:
            await self._link.publish(subjects.copy_subject(job), payload, stream=stream, headers=ROLL_UP)
        except NatsRefused as refused:
            raise full_or_refused(
                refused, stream, max_bytes=self._limits.events_max_bytes, size_bytes=len(payload)
            ) from refused

    async def newest(self, job: JobId) -> StateCopy | None:
        payload = await self._link.last_on(subjects.events_stream(job), subjects.copy_subject(job))
        return None if payload is None else subjects.copy_of(payload)

    async def drop_events(self, job: JobId, *, until: int) -> None:
        stream = subjects.events_stream(job)
        state = (await self._link.require_stream(stream))["state"]
        last = subjects.last_dropped(int(state["first_seq"]), int(state["last_seq"]), kept=self._limits.kept_events)
        if last is None:
            return
        copy = await self.newest(job)
        # The copy came after all that it holds, so it stays.
        if copy is not None:
            await self._link.api(f"STREAM.PURGE.{stream}", {"seq": min(until, last, copy.through) + 1})
