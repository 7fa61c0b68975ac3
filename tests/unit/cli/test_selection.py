"""Which events and lines of a log a person gets who asks for some of them."""

from __future__ import annotations

import json

from cli.selection import Selection
from tidegate.v1 import control_pb2, events_pb2


def event(sequence: int, *, at_s: int, has_failed: bool = False) -> control_pb2.ListEventsResponse:
    row = control_pb2.ListEventsResponse(
        stream_sequence=sequence, event=events_pb2.Event(occurred_unix_ns=at_s * 10**9)
    )
    if has_failed:
        row.event.failed.exit_status = 1
    else:
        row.event.progress.num_done = sequence
    return row


EVENTS = [event(1, at_s=10, has_failed=True), event(2, at_s=20, has_failed=True), event(3, at_s=30)]


def chosen(selection: Selection) -> list[int]:
    return [row.stream_sequence for row in selection.last(filter(selection.has_event, EVENTS))]


def test_without_flags_every_row_is_chosen() -> None:
    assert chosen(Selection()) == [1, 2, 3]
    assert Selection().has_line("no JSON")


def test_rows_of_other_types_and_older_ones_are_left_out() -> None:
    assert chosen(Selection(types=frozenset({"failed"}))) == [1, 2]
    assert chosen(Selection(since_unix_s=20.0)) == [2, 3]


def test_the_tail_counts_only_rows_of_the_type_that_was_asked_for() -> None:
    assert chosen(Selection(tail=1, types=frozenset({"failed"}))) == [2]
    assert chosen(Selection(tail=0)) == []


def test_a_line_counts_by_its_time_and_one_without_a_time_is_shown() -> None:
    since = Selection(since_unix_s=1.0)
    assert since.has_line(json.dumps({"time": "1970-01-01T00:00:01.5Z"}))
    assert not since.has_line(json.dumps({"time": "1970-01-01T00:00:00.5Z"}))
    assert since.has_line("Traceback (most recent call last):")
