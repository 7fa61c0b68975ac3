"""Control servers that play a job's scheduler: one that leaves with the job, and ones that break or restart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from tidegate.adapters.grpc_server import ERROR_METADATA
from tidegate.job import JobFolder
from tidegate.launcher.outcome import End, Outcome
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


class ResizingScheduler(LeavingScheduler):
    """Accepts a resize as event 2 or refuses it. Then each look at it, of two calls, finds the next of its `course`:
    its state and its events. The last one stays.

    A None in the course is a scheduler that starts again, an `End` the end of the job.
    """

    def __init__(
        self,
        folder: JobFolder,
        *course: tuple[control_pb2.GetJobResponse, list[control_pb2.ListEventsResponse]] | End | None,
        in_force: bool = False,
        refusal: tuple[grpc.StatusCode, str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        self._course = list(course)
        self._in_force = in_force
        self._refusal = refusal
        self._is_asked = self._is_second_call = False
        self._rows: list[control_pb2.ListEventsResponse] = []

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        if not self._is_asked:
            return control_pb2.GetJobResponse(job="small", phase="running")
        at = self._course[0]
        if not isinstance(at, tuple):
            self._course.pop(0)
            if isinstance(at, End):
                end_job(self._folder, self._rows, [])
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            raise AssertionError("abort always raises")
        status, self._rows = at
        if self._is_second_call and len(self._course) > 1:
            self._course.pop(0)
        self._is_second_call = not self._is_second_call
        return status

    async def ResizeActor(self, request: Any, context: Any) -> control_pb2.ResizeActorResponse:
        if self._refusal is not None:
            code, text, error = self._refusal
            await context.abort(code, text, trailing_metadata=((ERROR_METADATA, error),))
        self._is_asked = True
        return control_pb2.ResizeActorResponse(
            layout=request.layout, gpus=request.gpus, in_force=self._in_force, stream_sequence=2
        )

    async def ListEvents(self, request: Any, context: Any) -> AsyncIterator[control_pb2.ListEventsResponse]:
        for row in self._rows:
            if row.stream_sequence > request.after_sequence:
                yield row


def end_job(folder: JobFolder, rows: Iterable[control_pb2.ListEventsResponse], lines: Iterable[str]) -> None:
    folder.events.write_text("".join(json.dumps(MessageToDict(row)) + "\n" for row in rows))
    (folder.attempt().logs / "scheduler.jsonl").write_text("".join(f"{line}\n" for line in lines))
    status = control_pb2.GetJobResponse(job="small")
    Outcome(End.CANCELLED, "cancelled: enough", seed=0, wall_s=1.0, job=status).write(folder.result)


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
