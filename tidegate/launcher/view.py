"""What a person is shown while a job runs: the launcher tells, a view shows. See `cli.views`."""

from __future__ import annotations

from typing import Protocol

from tidegate.v1 import control_pb2, events_pb2


class View(Protocol):
    """Takes everything in the order in which it happens; never fails a run."""

    def step(self, what: str) -> None:
        """The launcher begins something: "starting NATS and Redis"."""
        ...

    def plan(self, message: str) -> None:
        """What the config comes to, told once at the start."""
        ...

    def note(self, message: str) -> None:
        """Something that a person should know: a service died and is started again."""
        ...

    def event(self, event: events_pb2.Event) -> None: ...

    def job(self, status: control_pb2.GetJobResponse) -> None:
        """The scheduler's own account, about once a second."""
        ...
