"""A job's events in its folder: one JSON line for each event, in the form of the Control API, written as they come.

The file continues over the job's attempts. The sequence of its last line says where to continue. A stream that lacks
the file's last event that stays has lost data with its server. A resume begins it anew, far beyond the file's last
place. Figures do not tell streams apart: a later one replaces them. [test_submitting: the_file_of_events]
[test_event_file: where_it_has_its_last_event]

Invariants:
- Lines are whole, except the last one after a kill. The next writer cuts that one off.
  [test_event_file: a_line_cut_off]
- No line carries the password of a URL, although the config in an event does.
  [test_event_file: loses_its_passwords]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from tidegate.codec import message_of_json
from tidegate.events import is_figure
from tidegate.json_text import parse_json
from tidegate.lines import append_lines
from tidegate.logs import without_credentials
from tidegate.ports.bus import EventLog
from tidegate.types import JobId
from tidegate.v1 import control_pb2, events_pb2

_ROOM = 1_000_000


class BadRecord(ValueError):
    """A line is not an event. The message names file and line."""


class EventFile:
    """Allows one writer. `sequence` is that of the last line, 0 in an empty file. `kept` is the place and the id of the
    last event that is no figure; None where there is none. `incarnation` is that of the last event that has one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sequence = 0
        self.kept: tuple[int, str] | None = None
        self.incarnation = 0
        for row in _rows_from_the_last(path):
            self.sequence = self.sequence or row.stream_sequence
            self.incarnation = self.incarnation or row.event.incarnation
            if self.kept is None and not is_figure(row.event):
                self.kept = (row.stream_sequence, row.event.id)
            if self.kept and self.incarnation:
                break

    def append(self, sequence: int, event: events_pb2.Event) -> None:
        """Appends one line. OSError."""
        line = json.dumps(event_row(sequence, event), ensure_ascii=False) + "\n"
        append_lines(self._path, line.encode())
        self.sequence = sequence
        if not is_figure(event):
            self.kept = (sequence, event.id)


async def is_log_of(kept: tuple[int, str], log: EventLog, job: JobId) -> bool:
    """Whether the log goes on from `EventFile.kept`: it has that event at its place, or has dropped it with all before
    it. False: the servers have lost data, all of it or the newest."""
    sequence, event_id = kept
    rows = await log.page(job, after_sequence=sequence - 1)
    if rows and rows[0][0] == sequence:
        return rows[0][1].id == event_id
    if not rows:
        return await log.last_sequence(job) >= sequence
    oldest = await log.page(job, after_sequence=0)
    return not oldest or oldest[0][0] > sequence


def room_after(path: Path, *, attempt: int) -> int:
    """The sequence after which a new stream begins, where the one of this file is lost: far beyond the file's last
    event, and so beyond those that the stream had and the file has not, in any attempt. 0 in the first attempt."""
    last = next((row.stream_sequence for row in _rows_from_the_last(path)), 0)
    return last + _ROOM * attempt if attempt > 1 else 0


def event_row(sequence: int, event: events_pb2.Event) -> dict[str, Any]:
    """The event in the form of the Control API, without the credentials of any URL."""
    row = control_pb2.ListEventsResponse(stream_sequence=sequence, event=event)
    fields: dict[str, Any] = without_credentials(MessageToDict(row, preserving_proto_field_name=True))
    return fields


def read_events(path: Path, *, kinds: Sequence[str] = ()) -> Iterator[control_pb2.ListEventsResponse]:
    """The events of a file that a writer may still append to. Skips broken lines. FileNotFoundError.

    With `kinds`, bodies of other kinds may be left out, unread: a file of thousands of iterations has a million."""
    names = [f'"{kind}"'.encode() for kind in kinds]
    for line in path.read_bytes().splitlines():
        if (not names or any(name in line for name in names)) and (row := _row(line)) is not None:
            yield row


def read_record(path: Path) -> Iterator[control_pb2.ListEventsResponse]:
    """All events of a file that nobody writes to any more.

    Leaves out a last line that a kill cut off. BadRecord for any other broken line. OSError.
    """
    data = path.read_bytes()
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            yield message_of_json(parse_json(line.strip()), control_pb2.ListEventsResponse())
        except ValueError as error:
            if not line.endswith(b"\n"):
                return
            reason = str(error).splitlines()[0].rstrip(".")
            raise BadRecord(f"{path}:{number} is no event of this release: {reason}") from error


def _rows_from_the_last(path: Path) -> Iterator[control_pb2.ListEventsResponse]:
    """The events of whole lines, the last one first. None where there is no file."""
    lines: list[bytes] = []
    with suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines(keepends=True)
    for line in reversed(lines):
        if line.endswith(b"\n") and (row := _row(line)) is not None:
            yield row


def _row(line: bytes) -> control_pb2.ListEventsResponse | None:
    """None for a line that a kill or a full disk cut off."""
    try:
        return message_of_json(parse_json(line), control_pb2.ListEventsResponse())
    except ValueError:
        return None
