"""Following a job to its end: a scheduler that leaves is the job's end or a pause, and every row comes once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli import job_streams
from cli.jobs import UnknownJob
from cli.selection import Selection
from tests.unit.cli.configs import small_config
from tests.unit.cli.schedulers import (
    FailingScheduler,
    FaultyScheduler,
    LeavingScheduler,
    RestartedScheduler,
    log_of,
    served,
)
from tidegate.job import load_job
from tidegate.launcher.claim import Start, claim_folder
from tidegate.launcher.control import NotRunning
from tidegate.launcher.event_file import EventFile
from tidegate.ports.rpc import PeerRefused
from tidegate.v1 import events_pb2


@pytest.fixture
def job(tmp_path: Path) -> Any:
    return load_job(small_config(tmp_path))


@pytest.mark.parametrize("scheduler", [LeavingScheduler, FailingScheduler])
async def test_events_that_are_followed_end_with_the_job_and_hold_its_last_ones(
    scheduler: type[LeavingScheduler], job: Any
) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        async with served(claim.folder, scheduler(claim.folder)):
            seen = [row.stream_sequence async for row in job_streams.events(claim.folder, follow=True)]
    assert seen == [1, 2, 3]
    assert job_streams.end_line(claim.folder) == "job small cancelled: enough"


async def test_logs_that_are_followed_end_with_the_job_and_hold_its_last_lines(job: Any) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        async with served(claim.folder, LeavingScheduler(claim.folder)):
            seen = [line async for line in job_streams.logs(claim.folder, source="", follow=True)]
    assert seen == log_of("a", "b", "c")


async def test_a_follower_of_the_tail_sees_the_last_row_and_then_every_new_one_once(job: Any) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        file = EventFile(claim.folder.events)
        for sequence in (1, 2):
            file.append(sequence, events_pb2.Event(id=f"e{sequence}"))
        async with served(claim.folder, LeavingScheduler(claim.folder)):
            rows = job_streams.chosen_events(claim.folder, Selection(tail=1), follow=True)
            seen = [row.stream_sequence async for row in rows]
    assert seen == [2, 3]


async def test_a_follower_of_the_tail_of_logs_sees_the_last_line_and_then_every_new_one_once(job: Any) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        (claim.attempt.logs / "scheduler.jsonl").write_text("".join(f"{line}\n" for line in log_of("a", "b")))
        async with served(claim.folder, LeavingScheduler(claim.folder)):
            lines = job_streams.chosen_logs(claim.folder, Selection(tail=1), source="", follow=True)
            seen = [line async for line in lines]
    assert seen == log_of("a", "b", "c")[1:]


async def test_events_go_on_after_the_last_one_seen_when_the_scheduler_starts_again(job: Any) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        scheduler = RestartedScheduler(claim.folder)
        async with served(claim.folder, scheduler):
            seen = [row.stream_sequence async for row in job_streams.events(claim.folder, follow=True)]
    assert seen == [1, 2, 3]
    assert scheduler.asked_after == [0, 1]


async def test_a_fault_of_a_live_scheduler_ends_the_stream_with_its_error(job: Any) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        async with served(claim.folder, FaultyScheduler(claim.folder)):
            with pytest.raises(PeerRefused, match="KeyError"):
                _ = [row async for row in job_streams.events(claim.folder, follow=True)]


async def test_a_run_killed_before_its_first_event_ends_the_stream_at_once(job: Any) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        pass
    with pytest.raises(NotRunning):
        _ = [row async for row in job_streams.events(claim.folder, follow=True)]


@pytest.mark.parametrize("follow", [True, False])
async def test_a_run_that_was_killed_has_the_events_that_were_written_as_they_came(job: Any, follow: bool) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        file = EventFile(claim.folder.events)
        file.append(1, events_pb2.Event(id="e1"))
        file.append(2, events_pb2.Event(id="e2"))
        with claim.folder.events.open("a") as lines:
            lines.write('{"stream_sequence": "3", "event": {"id": "e')
    assert [row.stream_sequence async for row in job_streams.events(claim.folder, follow=follow)] == [1, 2]


async def test_logs_are_of_the_newest_attempt_unless_another_is_named(job: Any) -> None:
    for start, word in ((Start.FRESH, "first"), (Start.RESUME, "second")):
        with claim_folder(job, start, now_unix_s=0.0) as claim:
            (claim.attempt.logs / "scheduler.jsonl").write_text("".join(f"{line}\n" for line in log_of(word)))
    assert [line async for line in job_streams.logs(claim.folder, source="", follow=False)] == log_of("second")
    assert list(job_streams.logs_of_attempt(claim.folder, 1, source="")) == log_of("first")
    with pytest.raises(UnknownJob, match="job small has no attempt 3; there are 1, 2"):
        job_streams.logs_of_attempt(claim.folder, 3, source="")


@pytest.mark.parametrize("attempt", [None, 1], ids=["the newest attempt", "a named attempt"])
async def test_a_line_without_a_time_is_in_the_tail_behind_the_line_before_it(job: Any, attempt: int | None) -> None:
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        first, second, third = log_of("a", "b", "c")
        (claim.attempt.logs / "actor@n0.jsonl").write_text(f"{first}\n{third}\ncut by a kill\n")
        (claim.attempt.logs / "scheduler.jsonl").write_text(f"{second}\n")
    for num_lines, want in ((2, [third, "cut by a kill"]), (4, [first, second, third, "cut by a kill"])):
        lines = job_streams.chosen_logs(
            claim.folder, Selection(tail=num_lines), source="", follow=False, attempt=attempt
        )
        assert [line async for line in lines] == want
