"""Following a job to its end: a scheduler that leaves is the job's end or a pause, and every row comes once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli import following
from cli.jobs import UnknownJob
from tests.unit.cli.configs import small_config
from tests.unit.cli.leaving_scheduler import LeavingScheduler, event_row, log_of
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import Start, claimed
from tidegate.launcher.control import NotRunning
from tidegate.launcher.event_file import EventFile
from tidegate.ports.rpc import PeerRefused
from tidegate.v1 import control_pb2, control_pb2_grpc, events_pb2


class FailingScheduler(LeavingScheduler):
    """Loses its bus before the stream."""

    code = grpc.StatusCode.INTERNAL


class FaultyScheduler(FailingScheduler):
    """Cannot tell any event, with the job running on."""

    async def _leave(self, context: Any) -> None:
        await context.abort(self.code, "KeyError: 'x'")


class RestartedScheduler(LeavingScheduler):
    """Breaks its first stream after one row, with the job still running."""

    def __init__(self, folder: JobFolder) -> None:
        super().__init__(folder)
        self.asked_after: list[int] = []

    async def ListEvents(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ListEventsResponse]:
        self.asked_after.append(request.after_sequence)
        if len(self.asked_after) == 1:
            yield event_row(1)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")
        yield event_row(2)
        await self._leave(context)


@asynccontextmanager
async def served(folder: JobFolder, scheduler: LeavingScheduler) -> AsyncIterator[None]:
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    folder.endpoint.write_text(json.dumps({"control": f"127.0.0.1:{port}"}))
    try:
        yield
    finally:
        await server.stop(None)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    return load_job(small_config(tmp_path))


@pytest.mark.parametrize("scheduler", [LeavingScheduler, FailingScheduler])
async def test_events_that_are_followed_end_with_the_job_and_hold_its_last_ones(
    scheduler: type[LeavingScheduler], job: Any
) -> None:
    with claimed(job, Start.FRESH, now_unix_s=0.0) as claim:
        async with served(claim.folder, scheduler(claim.folder)):
            seen = [row.stream_sequence async for row in following.events(claim.folder, follow=True)]
    assert seen == [1, 2, 3]
    assert following.end_line(claim.folder) == "job small cancelled: enough"


async def test_logs_that_are_followed_end_with_the_job_and_hold_its_last_lines(job: Any) -> None:
    with claimed(job, Start.FRESH, now_unix_s=0.0) as claim:
        async with served(claim.folder, LeavingScheduler(claim.folder)):
            seen = [line async for line in following.logs(claim.folder, source="", follow=True)]
    assert seen == log_of("a", "b", "c")


async def test_events_go_on_after_the_last_one_seen_when_the_scheduler_starts_again(job: Any) -> None:
    with claimed(job, Start.FRESH, now_unix_s=0.0) as claim:
        scheduler = RestartedScheduler(claim.folder)
        async with served(claim.folder, scheduler):
            seen = [row.stream_sequence async for row in following.events(claim.folder, follow=True)]
    assert seen == [1, 2, 3]
    assert scheduler.asked_after == [0, 1]


async def test_a_fault_of_a_live_scheduler_is_told_and_not_asked_for_ever(job: Any) -> None:
    with claimed(job, Start.FRESH, now_unix_s=0.0) as claim:
        async with served(claim.folder, FaultyScheduler(claim.folder)):
            with pytest.raises(PeerRefused, match="KeyError"):
                _ = [row async for row in following.events(claim.folder, follow=True)]


async def test_a_run_that_was_killed_before_anything_happened_has_no_events_and_is_not_waited_for(job: Any) -> None:
    with claimed(job, Start.FRESH, now_unix_s=0.0) as claim:
        pass
    with pytest.raises(NotRunning):
        _ = [row async for row in following.events(claim.folder, follow=True)]


@pytest.mark.parametrize("follow", [True, False])
async def test_a_run_that_was_killed_has_the_events_that_were_written_as_they_came(job: Any, follow: bool) -> None:
    with claimed(job, Start.FRESH, now_unix_s=0.0) as claim:
        file = EventFile(claim.folder.events)
        file.append(1, events_pb2.Event(id="e1"))
        file.append(2, events_pb2.Event(id="e2"))
        with claim.folder.events.open("a") as lines:
            lines.write('{"stream_sequence": "3", "event": {"id": "e')
    assert [row.stream_sequence async for row in following.events(claim.folder, follow=follow)] == [1, 2]


async def test_logs_are_of_the_newest_attempt_unless_another_is_named(job: Any) -> None:
    for start, word in ((Start.FRESH, "first"), (Start.RESUME, "second")):
        with claimed(job, start, now_unix_s=0.0) as claim:
            (claim.attempt.logs / "scheduler.jsonl").write_text("".join(f"{line}\n" for line in log_of(word)))
    assert [line async for line in following.logs(claim.folder, source="", follow=False)] == log_of("second")
    assert list(following.logs_of_attempt(claim.folder, 1, source="")) == log_of("first")
    with pytest.raises(UnknownJob, match="job small has no attempt 3; there are 1, 2"):
        following.logs_of_attempt(claim.folder, 3, source="")
