"""Control servers that play a job's scheduler: one that leaves with the job, one that moves GPUs by hand, and ones that
break or restart."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from services.scheduler.shell.control import write_endpoint
from tidegate.adapters.grpc_server import ERROR_METADATA, Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import credential_folder, issue_job_credentials
from tidegate.job import JobFolder
from tidegate.launcher.outcome import End, Outcome
from tidegate.types import JobId
from tidegate.v1 import control_pb2, control_pb2_grpc, events_pb2


def event_row(sequence: int) -> control_pb2.ListEventsResponse:
    return control_pb2.ListEventsResponse(stream_sequence=sequence, event=events_pb2.Event(id=f"e{sequence}"))


def log_of(*words: str) -> list[str]:
    return [json.dumps({"time": f"t{place}", "event": word}) for place, word in enumerate(words)]


class LeavingScheduler(control_pb2_grpc.ControlServicer):
    """Sends two rows. Then the job ends with a third row, and each stream breaks like at a server's stop."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        return control_pb2.GetJobResponse(job="small", phase="running")

    async def ListEvents(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ListEventsResponse]:
        for sequence in range(request.after_sequence + 1, 3):
            yield event_row(sequence)
        await self._leave(context)

    async def ReadLogs(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ReadLogsResponse]:
        for line in log_of("a", "b"):
            yield control_pb2.ReadLogsResponse(line=line)
        await self._leave(context)

    async def _not_asked(self, request: Any, context: Any) -> Any:
        raise AssertionError("a follower never calls this")

    CancelJob = ListGpus = ListDeadLetters = ReplayDeadLetter = DropDeadLetter = ResizeActor = _not_asked
    ScaleJob = MigrateGpus = DrainGpus = _not_asked

    async def _leave(self, context: Any) -> None:
        end_job(self._folder, [event_row(sequence) for sequence in (1, 2, 3)], log_of("a", "b", "c"))
        await context.abort(self.code, "Cancelling all calls")


class FailingScheduler(LeavingScheduler):
    """Loses its bus before the stream."""

    code = grpc.StatusCode.INTERNAL


class FaultyScheduler(FailingScheduler):
    """Cannot send any event, while the job runs on."""

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


class MovingScheduler(LeavingScheduler):
    """Accepts a manual move as event 2, or refuses it. Then it has the `status`, and sends the rows of its `course`.

    A None in the course is a scheduler that starts again: the stream breaks there, once. With an `End` the job ends.
    After its course the stream stays open. `gpus`: the store's GPUs, by the question; the last answer stays.
    """

    def __init__(
        self,
        folder: JobFolder,
        *course: control_pb2.ListEventsResponse | End | None,
        move: control_pb2.ManualMove | None = None,
        status: control_pb2.GetJobResponse | None = None,
        refusal: tuple[grpc.StatusCode, str, str] | None = None,
        gpus: list[list[control_pb2.GpuStatus]] | None = None,
    ) -> None:
        super().__init__(folder)
        self._course = list(course)
        self._move = move or control_pb2.ManualMove()
        self._status = status or control_pb2.GetJobResponse(job="small", phase="running")
        self._refusal = refusal
        self._gpus = gpus or [[]]
        self.asked: list[Any] = []
        self.num_behind = 0
        """So many answers do not have the last events yet."""
        self._num_sent = 0

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        status = control_pb2.GetJobResponse()
        status.CopyFrom(self._status)
        if self._num_sent and self.num_behind:
            self.num_behind -= 1
        else:
            status.applied_sequence = max(status.applied_sequence, self._num_sent)
        return status

    async def ListGpus(self, request: Any, context: Any) -> control_pb2.ListGpusResponse:
        rows = self._gpus.pop(0) if len(self._gpus) > 1 else self._gpus[0]
        return control_pb2.ListGpusResponse(gpus=rows)

    async def ScaleJob(self, request: Any, context: Any) -> control_pb2.ScaleJobResponse:
        return control_pb2.ScaleJobResponse(move=await self._answer(request, context))

    async def MigrateGpus(self, request: Any, context: Any) -> control_pb2.MigrateGpusResponse:
        return control_pb2.MigrateGpusResponse(move=await self._answer(request, context))

    async def DrainGpus(self, request: Any, context: Any) -> control_pb2.DrainGpusResponse:
        return control_pb2.DrainGpusResponse(move=await self._answer(request, context))

    async def _answer(self, request: Any, context: Any) -> control_pb2.ManualMove:
        self.asked.append(request)
        if self._refusal is not None:
            code, text, error = self._refusal
            await context.abort(code, text, trailing_metadata=((ERROR_METADATA, error),))
        self._move.stream_sequence = 0 if request.dry_run else 2
        self._num_sent = max(self._num_sent, self._move.stream_sequence)
        return self._move

    async def ListEvents(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ListEventsResponse]:
        for at in list(self._course):
            if isinstance(at, control_pb2.ListEventsResponse):
                if at.stream_sequence > request.after_sequence:
                    self._num_sent = at.stream_sequence
                    yield at
                continue
            rows = [row for row in self._course if isinstance(row, control_pb2.ListEventsResponse)]
            if isinstance(at, End):
                end_job(self._folder, rows, [])
            self._course.remove(at)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")
        if request.follow:
            await asyncio.Event().wait()


def end_job(folder: JobFolder, rows: Iterable[control_pb2.ListEventsResponse], lines: Iterable[str]) -> None:
    folder.events.write_text("".join(json.dumps(MessageToDict(row)) + "\n" for row in rows))
    (folder.attempt().logs / "scheduler.jsonl").write_text("".join(f"{line}\n" for line in lines))
    status = control_pb2.GetJobResponse(job="small")
    Outcome(End.CANCELLED, "cancelled: enough", seed=0, wall_s=1.0, job=status).write(folder.result)


@asynccontextmanager
async def served(folder: JobFolder, scheduler: LeavingScheduler) -> AsyncIterator[None]:
    """Within the block `control_of` finds the scheduler, as that of a live job."""
    issue_job_credentials(folder.root, JobId(folder.root.name))
    control = control_pb2.DESCRIPTOR.services_by_name["Control"]
    service = Service(control, partial(control_pb2_grpc.add_ControlServicer_to_server, scheduler))
    credential = partial(credential_folder, folder.root)
    server = await serve([service], "127.0.0.1:0", tls=Credentials(credential(Party.SCHEDULER)))
    write_endpoint(folder.endpoint, endpoint=server.endpoint, pid=os.getpid(), credential=credential(Party.OPERATOR))
    try:
        yield
    finally:
        await server.stop(grace_s=0.0)
