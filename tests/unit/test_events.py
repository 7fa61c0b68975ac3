"""Making events: derived ids, one body for each kind of event."""

from __future__ import annotations

from typing import get_args

import pytest

from tidegate.codec import WireError, check_event
from tidegate.events import EventBody, EventSource, body_of
from tidegate.types import GpuId, Grant, JobId, Role, Token
from tidegate.v1 import events_pb2, types_pb2

JOB = JobId("job")


def a_source(*, boot: int = 3) -> EventSource:
    return EventSource("actor@n0", role=Role.ACTOR, boot=boot, now_ns=lambda: 99)


def test_an_event_carries_its_source_and_an_id_derived_from_it() -> None:
    source = a_source()
    source.event(events_pb2.Progress(), job=JOB, incarnation=1)
    got = source.event(
        events_pb2.WeightsLoaded(version=7),
        job=JOB,
        incarnation=2,
        iteration=5,
        transition_id="t1",
        grants=[Grant(GpuId("n0/0"), Token(1, 4))],
    )
    want = events_pb2.Event(
        id="actor@n0/3/2",
        job="job",
        incarnation=2,
        iteration=5,
        transition_id="t1",
        source="actor@n0",
        boot=3,
        sequence=2,
        grants=[types_pb2.Grant(gpu="n0/0", token=types_pb2.Token(term=1, counter=4))],
        occurred_unix_ns=99,
        role=types_pb2.ROLE_ACTOR,
        weights_loaded=events_pb2.WeightsLoaded(version=7),
    )
    assert got == want


def test_two_starts_of_one_source_never_make_the_same_id() -> None:
    ids = [
        source.event(events_pb2.Progress(), job=JOB, incarnation=1).id
        for source in (a_source(boot=1), a_source(boot=2))
        for _ in range(3)
    ]
    assert len(set(ids)) == 6


@pytest.mark.parametrize("body_type", get_args(EventBody))
def test_every_body_travels_even_when_all_its_fields_are_empty(body_type: type[EventBody]) -> None:
    event = a_source().event(body_type(), job=JOB, incarnation=1)
    check_event(event)
    assert body_of(event) == body_type()


def test_every_body_of_the_schema_can_be_made_into_an_event() -> None:
    want = {field.message_type for field in events_pb2.Event.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert {body_type.DESCRIPTOR for body_type in get_args(EventBody)} == want


def test_a_source_that_is_no_component_has_no_role() -> None:
    source = EventSource("scheduler", role=None, boot=1, now_ns=lambda: 1)
    event = source.event(events_pb2.JobResumeRequested(), job=JOB, incarnation=1)
    assert event.role == types_pb2.ROLE_UNSPECIFIED


def test_an_event_without_a_body_has_none_to_give() -> None:
    with pytest.raises(WireError, match=r"Event\.body of 'x/1/1' is missing"):
        body_of(events_pb2.Event(id="x/1/1"))


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_source_whose_name_would_blur_the_id_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="event source"):
        EventSource(name, role=None, boot=1, now_ns=lambda: 1)


def test_a_source_that_never_started_is_refused() -> None:
    with pytest.raises(ValueError, match="boot=0 counts its starts"):
        a_source(boot=0)
