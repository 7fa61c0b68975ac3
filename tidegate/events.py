"""Makes events. An event says which source saw it, in which start of that source, and in what order.

So every id is derived: `<source>/<boot>/<sequence>` is the source's name, the count of its starts, and the count of its
events since that start.

- All copies of one event have one id. [test_events: an_event_carries_its]
- Two events never share an id, as long as every start of a source has its own boot.
  [test_events: two_starts_of_one_source]

An `EventSource` counts without a lock: it belongs to one event loop (or one thread) and must not be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidegate.codec import WireError, encode_grants, encode_role
from tidegate.types import Grant, JobId, Role
from tidegate.v1 import events_pb2
from tidegate.v1.events_pb2 import Event

EventBody = (
    events_pb2.Progress
    | events_pb2.Backlog
    | events_pb2.GpusReleased
    | events_pb2.GpusAcquired
    | events_pb2.LayoutCommitted
    | events_pb2.Failed
    | events_pb2.InstanceJoined
    | events_pb2.InstanceLost
    | events_pb2.LeadElected
    | events_pb2.WeightsPublished
    | events_pb2.WeightsLoaded
    | events_pb2.IterationReported
    | events_pb2.CheckpointSaved
    | events_pb2.DeadLettered
    | events_pb2.JobSubmitted
    | events_pb2.JobCancelRequested
    | events_pb2.JobResumeRequested
    | events_pb2.GateReported
    | events_pb2.CommandAnswered
    | events_pb2.ResizeRequested
    | events_pb2.ResizeFailed
    | events_pb2.SplitRequested
    | events_pb2.DrainRequested
    | events_pb2.EvaluationReported
    | events_pb2.Generation
    | events_pb2.Inferring
    | events_pb2.Training
)


FIGURES = (
    events_pb2.Progress,
    events_pb2.Backlog,
    events_pb2.Generation,
    events_pb2.Inferring,
    events_pb2.Training,
)
"""Bodies whose successors replace them."""


class EventSource:
    """Makes the events of one start of one source. `role` is None for a source that is no component ("scheduler")."""

    def __init__(self, source: str, *, role: Role | None, boot: int, now_ns: Callable[[], int]) -> None:
        if not source or "/" in source:
            raise ValueError(f"event source {source!r} must be non-empty and without '/', which separates event ids")
        if boot < 1:
            raise ValueError(f"event source {source}: boot={boot} counts its starts, so it is at least 1")
        self._source = source
        self._role = role
        self._boot = boot
        self._now_ns = now_ns
        self._sequence = 0

    def event(
        self,
        body: EventBody,
        *,
        job: JobId,
        incarnation: int,
        iteration: int = 0,
        transition_id: str = "",
        grants: Sequence[Grant] = (),
    ) -> Event:
        """Makes the next event of this source. `grants` are the grants under which the source acted."""
        self._sequence += 1
        event = Event(
            id=f"{self._source}/{self._boot}/{self._sequence}",
            job=job,
            incarnation=incarnation,
            iteration=iteration,
            transition_id=transition_id,
            source=self._source,
            boot=self._boot,
            sequence=self._sequence,
            grants=encode_grants(grants),
            occurred_unix_ns=self._now_ns(),
        )
        if self._role is not None:
            event.role = encode_role(self._role)
        body_field = getattr(event, _field_of(body))
        body_field.SetInParent()
        body_field.CopyFrom(body)
        return event


def body_of(event: Event) -> EventBody:
    """The event's body: what happened. WireError when the event has no body."""
    field = event.WhichOneof("body")
    if field is None:
        raise WireError(f"Event.body of {event.id!r} is missing; the sender must set what happened")
    body: EventBody = getattr(event, field)
    return body


def is_figure(event: Event) -> bool:
    """Whether the source's next event of this kind replaces the event."""
    field = event.WhichOneof("body")
    return field is not None and isinstance(getattr(event, field), FIGURES)


def _field_of(body: EventBody) -> str:
    for field in Event.DESCRIPTOR.oneofs_by_name["body"].fields:
        if field.message_type is body.DESCRIPTOR:
            return field.name
    raise ValueError(f"{body.DESCRIPTOR.name} is not the body of an event; see Event.body in events.proto")
