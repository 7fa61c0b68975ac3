"""A job's events in its folder: a JSON line each, in the form of the Control API, written as they come.

The file goes on over the job's attempts. Where it went on is known by the last line's sequence and id: a stream that
holds no such event is another one (the servers' data was lost), and all of it follows. Invariants: lines are whole, but
for the last one after a kill, which the next writer cuts off; none carries the password of a URL, though the config in
an event does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from tidegate.lines import append_lines
from tidegate.logs import without_credentials
from tidegate.v1 import control_pb2, events_pb2


class BadRecord(ValueError):
    """A line is no event; the message names file and line."""


class EventFile:
    """For one writer. `sequence` and `event_id` are those of the last line; 0 and empty where there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        row = _row(_last_line(path))
        self.sequence = row.stream_sequence if row is not None else 0
        self.event_id = row.event.id if row is not None else ""

    def append(self, sequence: int, event: events_pb2.Event) -> None:
        """OSError."""
        line = json.dumps(event_row(sequence, event), ensure_ascii=False) + "\n"
        append_lines(self._path, line.encode())
        self.sequence, self.event_id = sequence, event.id


def event_row(sequence: int, event: events_pb2.Event) -> dict[str, Any]:
    """As the Control API tells it, without the credentials of any URL."""
    row = control_pb2.ListEventsResponse(stream_sequence=sequence, event=event)
    told: dict[str, Any] = without_credentials(MessageToDict(row, preserving_proto_field_name=True))
    return told


def read_events(path: Path) -> Iterator[control_pb2.ListEventsResponse]:
    """Of a file that may be at work on. FileNotFoundError."""
    for line in path.read_bytes().splitlines():
        if (row := _row(line)) is not None:
            yield row


def read_record(path: Path) -> Iterator[control_pb2.ListEventsResponse]:
    """All of it, of a file that nobody writes to any more. BadRecord; what a kill left of a last line is left out.
    OSError."""
    data = path.read_bytes()
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            yield ParseDict(json.loads(line.strip()), control_pb2.ListEventsResponse())
        except (ValueError, ParseError) as error:
            if not line.endswith(b"\n"):
                return
            told = str(error).splitlines()[0].rstrip(".")
            raise BadRecord(f"{path}:{number} is no event of this release: {told}") from error


def _last_line(path: Path) -> bytes:
    """The last whole one; empty where there is none."""
    last = b""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            last = line if line.endswith(b"\n") else last
    return last


def _row(line: bytes) -> control_pb2.ListEventsResponse | None:
    """None of what a kill or a full disk cut off."""
    try:
        return ParseDict(json.loads(line), control_pb2.ListEventsResponse())
    except (ValueError, ParseError):
        return None
