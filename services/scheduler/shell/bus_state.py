"""What the bus alone tells of a job: the copy of its state, and the events that follow.

Invariant: a scheduler that starts beside a store that lost its session knows the instances whose gates it has to ask.
[test_bus_state: the_bus_alone_tells]
"""

from __future__ import annotations

from contextlib import suppress

from services.scheduler.decide.turn import begin
from services.scheduler.shell.codecs.state_codec import decode_state, event_of
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from tidegate.codec import WireError
from tidegate.ports.bus import EventLog, StateCopies
from tidegate.types import JobId


async def read_events(log: EventLog, job: JobId, *, after: int, until: int | None = None) -> list[ev.Event]:
    """The stream's events after a sequence, at least until another one. `until` None: all that are there."""
    events: list[ev.Event] = []
    while page := await log.page(job, after_sequence=after):
        for sequence, message in page:
            # One that cannot be read is dead-lettered at its delivery.
            with suppress(WireError):
                events.append(event_of(message, stream_sequence=sequence))
        after = page[-1][0]
        if until is not None and after >= until:
            break
    return events


async def told_by_bus(log: EventLog, copies: StateCopies, job: JobId) -> ClusterState:
    """The state that the bus alone gives. It is behind the store's by the decisions since the copy."""
    copy = await copies.newest(job)
    state = decode_state(copy.state) if copy is not None else ClusterState(job=job)
    return begin(state, await read_events(log, job, after=state.applied_seq)).after
