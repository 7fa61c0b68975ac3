"""The file of a job's events: whole lines, each event once, no password, whatever cut off the former writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidegate.adapters.memory_bus import MemoryBus
from tidegate.events import EventSource
from tidegate.launcher.event_file import EventFile, is_log_of, read_events
from tidegate.ports.bus import BusLimits, StateCopy
from tidegate.types import JobId
from tidegate.v1 import events_pb2


def an_event(number: int) -> events_pb2.Event:
    return events_pb2.Event(id=f"actor@n0/1/{number}", failed=events_pb2.Failed(exit_status=number))


def sequences(path: Path) -> list[int]:
    return [row.stream_sequence for row in read_events(path)]


@pytest.mark.parametrize(
    ("kept", "dropped", "want"),
    [
        pytest.param((20, "launcher/1/20"), 0, True, id="it has the event"),
        pytest.param((19, "launcher/1/20"), 0, False, id="it has another one in that place"),
        pytest.param((22, "launcher/1/21"), 0, False, id="it ends before"),
        pytest.param((3, "launcher/1/3"), 10, True, id="it has dropped it with all before it"),
    ],
)
async def test_a_log_is_the_files_where_it_has_its_last_event(kept: tuple[int, str], dropped: int, want: bool) -> None:
    bus, job = MemoryBus(BusLimits(kept_events=8)), JobId("small")
    await bus.streams.open_job(job)
    source = EventSource("launcher", role=None, boot=1, now_ns=lambda: 1)
    for _ in range(20):
        await bus.events.publish(source.event(events_pb2.Failed(), job=job, incarnation=1))
    await bus.copies.keep(job, StateCopy(20, b"state"))
    await bus.copies.drop_events(job, until=dropped)
    assert await is_log_of(kept, bus.events, job) is want


async def test_a_log_without_events_is_not_the_files() -> None:
    bus = MemoryBus()
    await bus.streams.open_job(JobId("small"))
    assert not await is_log_of((1, "launcher/1/1"), bus.events, JobId("small"))


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    for number in (1, 2):
        file.append(number, an_event(number))
    assert [row.event for row in read_events(tmp_path / "events.jsonl")] == [an_event(1), an_event(2)]


def test_a_later_writer_knows_the_last_event_by_its_place_and_id(tmp_path: Path) -> None:
    assert (EventFile(tmp_path / "events.jsonl").sequence, EventFile(tmp_path / "events.jsonl").kept) == (0, None)
    EventFile(tmp_path / "events.jsonl").append(7, an_event(3))
    again = EventFile(tmp_path / "events.jsonl")
    assert (again.sequence, again.kept) == (7, (7, "actor@n0/1/3"))
    again.append(8, an_event(4))
    assert sequences(tmp_path / "events.jsonl") == [7, 8]


def test_a_figure_tells_the_writer_how_far_it_is_and_not_of_which_stream(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    figure = events_pb2.Event(id="actor@n0/1/4", progress=events_pb2.Progress(phase="train"))
    for number, event in ((7, an_event(3)), (8, figure), (9, figure)):
        file.append(number, event)
    again = EventFile(tmp_path / "events.jsonl")
    assert (again.sequence, again.kept) == (file.sequence, file.kept) == (9, (7, "actor@n0/1/3"))


@pytest.mark.parametrize("rest", ['{"stream_sequence": "2", "ev', "\0\0\0", '{"a": 1}'])
def test_a_line_cut_off_is_not_read_and_goes_when_the_next_is_written(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "events.jsonl"
    EventFile(path).append(1, an_event(1))
    with path.open("a") as lines:
        lines.write(rest)
    assert sequences(path) == [1]
    EventFile(path).append(2, an_event(2))
    assert [json.loads(line)["stream_sequence"] for line in path.read_text().splitlines()] == ["1", "2"]


def test_a_file_that_cannot_be_written_says_so_and_takes_the_event_later(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "events.jsonl"
    file = EventFile(path)
    with pytest.raises(FileNotFoundError):
        file.append(1, an_event(1))
    path.parent.mkdir()
    file.append(1, an_event(1))
    assert sequences(path) == [1]


def test_the_config_in_an_event_loses_its_passwords(tmp_path: Path) -> None:
    config = json.dumps({"servers": {"redis_url": "rediss://me:secret@host:6379"}})
    submitted = events_pb2.Event(id="launcher/1/1", job_submitted=events_pb2.JobSubmitted(config_json=config))
    EventFile(tmp_path / "events.jsonl").append(1, submitted)
    assert "secret" not in (tmp_path / "events.jsonl").read_text()
    (row,) = read_events(tmp_path / "events.jsonl")
    assert json.loads(row.event.job_submitted.config_json) == {"servers": {"redis_url": "rediss://host:6379"}}
    assert submitted.job_submitted.config_json == config
