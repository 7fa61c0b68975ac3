"""How a simulated job's services speak: events, each with the next sequence number of its source's start."""

from __future__ import annotations

from collections import deque

from services.scheduler.state import events as ev
from tidegate.types import Grant, JobId, Role

JOB = JobId("simulated")


class Voice:
    """`outbox` is what was said and not delivered yet, in order."""

    def __init__(self) -> None:
        self.outbox: deque[ev.Event] = deque()
        self.incarnation = 0
        self.iteration = 0
        self._sequences: dict[tuple[str, int], int] = {}

    def say(
        self,
        source: str,
        body: ev.Body,
        *,
        role: Role | None = None,
        transition: str = "",
        grants: tuple[Grant, ...] = (),
        boot: int = 1,
    ) -> None:
        """`boot`: which start of the source it is that speaks."""
        sequence = self._sequences.get((source, boot), 0) + 1
        self._sequences[source, boot] = sequence
        event = ev.Event(
            job=JOB,
            source=source,
            boot=boot,
            sequence=sequence,
            body=body,
            incarnation=self.incarnation,
            iteration=self.iteration,
            transition_id=transition,
            grants=grants,
            role=role,
        )
        self.outbox.append(event)
