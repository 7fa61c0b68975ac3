"""The Control APIs of a cluster's jobs, asked from another machine: over TLS, to jobs that play theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.scheduler.cluster.job_control import jobs_control
from tests.integration.cluster.lab import Lab, serving
from tests.unit.cli.schedulers import LeavingScheduler, MovingScheduler, event_row, served
from tidegate.certs.identity import Party
from tidegate.job import JobFolder
from tidegate.ports.rpc import PeerRefused
from tidegate.v1 import control_pb2, control_pb2_grpc


class Silent(LeavingScheduler):
    """Sends one row, and then none until the reader leaves."""

    def __init__(self, folder: JobFolder) -> None:
        super().__init__(folder)
        self.has_left = asyncio.Event()

    async def ListEvents(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ListEventsResponse]:
        try:
            yield event_row(1)
            await asyncio.Event().wait()
        finally:
            self.has_left.set()


class JobsLab(Lab):
    @asynccontextmanager
    async def calling(self, party: Party, name: str = "me") -> AsyncIterator[control_pb2_grpc.ControlAsyncStub]:
        async with self.channel(party, name) as channel:
            yield control_pb2_grpc.ControlStub(channel)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[JobsLab]:
    async with serving(tmp_path, [jobs_control(tmp_path / "jobs")]) as found:
        yield JobsLab(found.authority, found.folder, found.endpoint)


class Asked(control_pb2_grpc.ControlServicer):
    """Answers every method with nothing, and notes the jobs that it was asked about."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[str]] = {}
        for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods:
            setattr(self, method.name, self._stream if method.server_streaming else self._single(method))

    def _single(self, method: Any) -> Any:
        async def single(request: Any, context: Any) -> Any:
            self.jobs.setdefault(type(request).__name__, []).append(request.job)
            return getattr(control_pb2, method.output_type.name)()

        return single

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.jobs.setdefault(type(request).__name__, []).append(request.job)
        yield control_pb2.ListEventsResponse() if "Events" in type(request).__name__ else control_pb2.ReadLogsResponse()


async def test_every_method_goes_on_to_the_job_that_was_named(lab: JobsLab) -> None:
    one, two = Asked(), Asked()  # type: ignore[abstract]
    async with served(lab.job("one"), one), served(lab.job("two"), two), lab.calling(Party.OPERATOR) as control:  # type: ignore[arg-type]
        for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods:
            request = getattr(control_pb2, method.input_type.name)(job="one")
            called: Any = getattr(control, method.name)(request)
            if method.server_streaming:
                assert len([row async for row in called]) == 1
            else:
                assert type(await called).__name__ == method.output_type.name
            assert one.jobs[method.input_type.name][-1] == "one"
    assert not two.jobs


async def test_what_a_job_refuses_is_told_as_it_says_it(lab: JobsLab) -> None:
    refusal = (grpc.StatusCode.FAILED_PRECONDITION, "only 2 are free", "ImpossibleSplit")
    moving = MovingScheduler(lab.job("one"), refusal=refusal)
    async with served(lab.job("one"), moving), lab.calling(Party.OPERATOR) as control:
        with pytest.raises(PeerRefused) as refused:
            await control.ScaleJob(control_pb2.ScaleJobRequest(job="one"))
    told = refused.value
    assert (told.status, told.reason, told.error) == ("FAILED_PRECONDITION", "only 2 are free", "ImpossibleSplit")


@pytest.mark.parametrize(
    ("name", "status", "error", "told"),
    [
        ("one", "NOT_FOUND", "NotRunning", "job one is not running"),
        ("none", "NOT_FOUND", "NotRunning", "job none is not running"),
        ("../one", "INVALID_ARGUMENT", "ValueError", "../one"),
        ("", "INVALID_ARGUMENT", "ValueError", "job"),
    ],
)
async def test_a_job_that_does_not_answer_is_told(lab: JobsLab, name: str, status: str, error: str, told: str) -> None:
    lab.job("one")
    async with lab.calling(Party.OPERATOR) as control:
        with pytest.raises(PeerRefused, match=told) as refused:
            await control.GetJob(control_pb2.GetJobRequest(job=name))
    assert (refused.value.status, refused.value.error) == (status, error)


async def test_a_viewer_and_another_job_may_not_change_it(lab: JobsLab) -> None:
    job = lab.job("one")
    moving = MovingScheduler(job)
    async with served(job, moving):
        async with lab.calling(Party.VIEWER) as control:
            assert (await control.GetJob(control_pb2.GetJobRequest(job="one"))).phase == "running"
            with pytest.raises(PeerRefused, match="viewer/me of cluster lab may not call"):
                await control.ScaleJob(control_pb2.ScaleJobRequest(job="one"))
        async with lab.calling(Party.JOB, "two") as control:
            with pytest.raises(PeerRefused, match="a job reaches its own processes alone"):
                await control.GetJob(control_pb2.GetJobRequest(job="one"))
    assert not moving.asked


async def test_a_reader_that_leaves_ends_the_stream_of_the_job(lab: JobsLab) -> None:
    job = lab.job("one")
    silent = Silent(job)
    async with served(job, silent):
        async with lab.calling(Party.OPERATOR) as control:
            rows = aiter(control.ListEvents(control_pb2.ListEventsRequest(job="one", follow=True)))
            assert (await anext(rows)).stream_sequence == 1
        await asyncio.wait_for(silent.has_left.wait(), 10.0)
