"""What a person sees while a job runs: the launcher reports, a view shows. See `cli.views`."""

from __future__ import annotations

from typing import Protocol

from tidegate.v1 import control_pb2, events_pb2


class View(Protocol):
    """Gets every report in the order in which things happen. It never fails a run."""

    def step(self, what: str) -> None:
        """The launcher begins a step, for example "starting NATS and Redis"."""
        ...

    def plan(self, message: str) -> None:
        """What the config amounts to. Reported once at the start."""
        ...

    def note(self, message: str) -> None:
        """Something that a person should know, for example that a service died and restarts."""
        ...

    def event(self, event: events_pb2.Event) -> None: ...

    def job(self, status: control_pb2.GetJobResponse) -> None:
        """The scheduler's own report, about once a second."""
        ...
