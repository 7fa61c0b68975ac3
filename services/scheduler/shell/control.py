"""The Control API serves the requests of a person to a live job. It reads the state that was last read or written, and
makes changes by events.

Invariants:
- Nothing here changes the state directly: a cancel becomes an event like any other, and so do a manual move and the
  replay or drop of the last dead letter. [test_control: cancel_becomes_an_event]
- A job that this scheduler does not run is refused by name. [test_control: another_job_is_refused]
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from services.scheduler.evolve import resizes
from services.scheduler.evolve.manual_moves import open_places, with_split_under_way
from services.scheduler.policy import Policy
from services.scheduler.shell import manual_requests
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Component
from services.scheduler.state.course import Evaluation, Summary
from services.scheduler.state.homes import home_spec
from services.scheduler.state.values import Placed, total
from tidegate.codec import decode_layout, encode_grants, encode_layout, encode_role, encode_token, require
from tidegate.events import EventBody
from tidegate.logs import without_credentials
from tidegate.ownership.records import GpuRecord
from tidegate.ports.bus import DeadLetters, EventLog, UnknownDeadLetter
from tidegate.ports.store import OwnershipMap
from tidegate.runtime.announcer import Announcer
from tidegate.types import GpuId, JobId, Layout, Role
from tidegate.v1 import control_pb2, control_pb2_grpc, events_pb2, types_pb2

_LOG_LOOKS_PER_S = 4
MAX_WAIT_S = 60.0
"""The longest wait of `GetJob` for a change. Whoever waits longer asks again."""
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class UnknownJob(ValueError):
    """This scheduler does not run the job, or the job has no log of that name."""


class ResizeRefused(ValueError):
    """The actor can never be in the requested layout, or on the requested GPUs."""


class NotNow(ValueError):
    """The job is in a phase in which no GPU moves by hand."""


class ControlServicer(control_pb2_grpc.ControlServicer):
    """`state` gives the state that was last read or written; `reason` gives the reason of the last decision;
    `changed` waits so many seconds at most for a state of another version; `layout_fault` says why the job's actor can
    never be in a layout."""

    def __init__(
        self,
        job: JobId,
        *,
        state: Callable[[], ClusterState | None],
        reason: Callable[[], str],
        changed: Callable[[float], Awaitable[None]],
        gpus: OwnershipMap,
        log: EventLog,
        dead_letters: DeadLetters,
        announcer: Announcer,
        logs: Path,
        layout_fault: Callable[[Layout], str | None],
        policy: Policy,
    ) -> None:
        self._job = job
        self._policy = policy
        self._layout_fault = layout_fault
        self._state = state
        self._reason = reason
        self._changed = changed
        self._gpus = gpus
        self._log = log
        self._dead_letters = dead_letters
        self._announcer = announcer
        self._logs = logs

    async def GetJob(self, request: control_pb2.GetJobRequest, context: Context) -> control_pb2.GetJobResponse:
        state = self._own(request.job)
        if state.version == request.known_state_version and request.wait_s > 0:
            await self._changed(min(request.wait_s, MAX_WAIT_S))
            state = self._own(request.job)
        return control_pb2.GetJobResponse(
            job=state.job,
            incarnation=state.incarnation,
            phase=state.phase,
            message=state.message,
            iteration=state.next_iteration,
            num_iterations=state.spec.num_iterations if state.spec else 0,
            version=max(state.snapshots, default=0),
            components=[_component(role, state.components[role], is_lent=is_lent(state, role)) for role in Role],
            iterations=[_summary(summary) for summary in state.summaries if not summary.is_superseded],
            last_reason=self._reason(),
            final_checksum=state.final_checksum,
            evaluations=[_evaluation(evaluation) for evaluation in state.evaluations],
            applied_sequence=state.applied_seq,
            open_resizes=[
                control_pb2.ActorPlace(layout=encode_layout(placed.layout), gpus=placed.gpus)
                for placed in resizes.open_requests(state)
            ],
            open_places=manual_requests.encode_places(open_places(state)),
            drained_gpus=state.manual.drained,
            used_drained_gpus=manual_requests.used_drained(state, self._policy),
            state_version=state.version,
        )

    async def ListGpus(self, request: control_pb2.ListGpusRequest, context: Context) -> control_pb2.ListGpusResponse:
        return control_pb2.ListGpusResponse(gpus=gpu_statuses(await self._gpus.gpus()))

    async def ListEvents(
        self, request: control_pb2.ListEventsRequest, context: Context
    ) -> AsyncIterator[control_pb2.ListEventsResponse]:
        self._own(request.job)
        events = self._log.read(self._job, after_sequence=request.after_sequence, follow=request.follow)
        async for sequence, event in events:
            if event.HasField("job_submitted"):
                # Avoid a leak of passwords: the config in the event contains the servers' URLs.
                event.job_submitted.config_json = without_credentials(event.job_submitted.config_json)
            yield control_pb2.ListEventsResponse(stream_sequence=sequence, event=event)

    async def ReadLogs(
        self, request: control_pb2.ReadLogsRequest, context: Context
    ) -> AsyncIterator[control_pb2.ReadLogsResponse]:
        self._own(request.job)
        offsets: dict[Path, int] = {}
        while True:
            for path in self._log_files(request.source):
                lines, offsets[path] = _lines_after(path, offsets.get(path, 0))
                for line in lines:
                    yield control_pb2.ReadLogsResponse(line=line)
            if not request.follow:
                return
            await asyncio.sleep(1 / _LOG_LOOKS_PER_S)

    async def CancelJob(self, request: control_pb2.CancelJobRequest, context: Context) -> control_pb2.CancelJobResponse:
        await self._publish(request.job, events_pb2.JobCancelRequested(reason=request.reason))
        return control_pb2.CancelJobResponse()

    async def ResizeActor(
        self, request: control_pb2.ResizeActorRequest, context: Context
    ) -> control_pb2.ResizeActorResponse:
        require(request, "layout")
        state, layout = self._movable(request.job), decode_layout(request.layout)
        assert state.spec is not None, "a job that runs has a config"
        # In a thread: the first request reads the job's model and tokenizer.
        if (fault := await asyncio.to_thread(self._layout_fault, layout)) is not None:
            raise ResizeRefused(fault)
        gpus = tuple(GpuId(gpu) for gpu in request.gpus)
        placed = Placed(gpus, layout) if gpus else resizes.target(state, layout)
        # A split whose resize is under way ends first: it comes into force or fails, and both must leave these GPUs.
        for home in (home_spec(state, state.spec), home_spec(with_split_under_way(state), state.spec)):
            if (fault := resizes.fault(home, placed)) is not None:
                raise ResizeRefused(fault)
        wire_layout, in_force = encode_layout(placed.layout), resizes.is_in_force(state, placed)
        # Publish in both cases: an actor that a policy put there is at home there from now on.
        sequence = await self._publish(request.job, events_pb2.ResizeRequested(layout=wire_layout, gpus=placed.gpus))
        return control_pb2.ResizeActorResponse(
            layout=wire_layout, gpus=placed.gpus, in_force=in_force, stream_sequence=sequence
        )

    async def ScaleJob(self, request: control_pb2.ScaleJobRequest, context: Context) -> control_pb2.ScaleJobResponse:
        state = self._movable(request.job)
        # In a thread: the first request reads the job's model and tokenizer.
        answer = await asyncio.to_thread(manual_requests.scaled, state, self._policy, request, self._layout_fault)
        move = await self._done(request.job, answer, is_dry=request.dry_run)
        return control_pb2.ScaleJobResponse(move=move)

    async def MigrateGpus(
        self, request: control_pb2.MigrateGpusRequest, context: Context
    ) -> control_pb2.MigrateGpusResponse:
        answer = manual_requests.migrated(self._movable(request.job), self._policy, request)
        move = await self._done(request.job, answer, is_dry=request.dry_run)
        return control_pb2.MigrateGpusResponse(move=move)

    async def DrainGpus(self, request: control_pb2.DrainGpusRequest, context: Context) -> control_pb2.DrainGpusResponse:
        answer = manual_requests.drained(self._movable(request.job), self._policy, request)
        move = await self._done(request.job, answer, is_dry=request.dry_run)
        return control_pb2.DrainGpusResponse(move=move)

    async def _done(self, job: str, answer: manual_requests.Answer, *, is_dry: bool) -> control_pb2.ManualMove:
        if not is_dry:
            answer.move.stream_sequence = await self._publish(job, answer.body)
        return answer.move

    async def ListDeadLetters(
        self, request: control_pb2.ListDeadLettersRequest, context: Context
    ) -> control_pb2.ListDeadLettersResponse:
        self._own(request.job)
        letters = [
            control_pb2.DeadLetter(
                id=letter.id, subject=letter.subject, reason=letter.reason, size_bytes=letter.size_bytes
            )
            for letter in await self._dead_letters.list(self._job)
        ]
        return control_pb2.ListDeadLettersResponse(dead_letters=letters)

    async def ReplayDeadLetter(
        self, request: control_pb2.ReplayDeadLetterRequest, context: Context
    ) -> control_pb2.ReplayDeadLetterResponse:
        self._own(request.job)
        await self._dead_letters.replay(self._job, request.id)
        await self._resume_without_dead_letters(request.job)
        return control_pb2.ReplayDeadLetterResponse()

    async def DropDeadLetter(
        self, request: control_pb2.DropDeadLetterRequest, context: Context
    ) -> control_pb2.DropDeadLetterResponse:
        state = self._own(request.job)
        try:
            await self._dead_letters.drop(self._job, request.id)
        except UnknownDeadLetter:
            # A message that came again after its letter was dropped pauses the job and makes no letter.
            if state.phase is not Phase.PAUSED or await self._dead_letters.list(self._job):
                raise
        await self._resume_without_dead_letters(request.job)
        return control_pb2.DropDeadLetterResponse()

    async def _resume_without_dead_letters(self, job: str) -> None:
        if not await self._dead_letters.list(self._job):
            await self._publish(job, events_pb2.JobResumeRequested())

    async def _publish(self, job: str, body: EventBody) -> int:
        """Returns the event's sequence on the job's stream."""
        state = self._own(job)
        sequence = await self._announcer.publish(body, incarnation=state.incarnation)
        assert sequence is not None, "only figures are left out"
        return sequence

    def _movable(self, job: str) -> ClusterState:
        """The state of a job whose GPUs a person can move. NotNow: it is in another phase."""
        state = self._own(job)
        if state.spec is None or state.phase is not Phase.RUNNING:
            raise NotNow(f"job {job} is {state.phase}: GPUs move by hand while their job is running")
        return state

    def _own(self, job: str) -> ClusterState:
        state = self._state()
        if job != self._job:
            raise UnknownJob(f"job {job!r} is not here; this scheduler runs {self._job!r}")
        return state if state is not None else ClusterState(job=self._job)

    def _log_files(self, source: str) -> list[Path]:
        files = sorted(self._logs.glob("*.jsonl"))
        if not source:
            return files
        chosen = [path for path in files if path.stem == source]
        if not chosen:
            raise UnknownJob(f"no log of {source!r}; there are {', '.join(path.stem for path in files) or 'none'}")
        return chosen


def is_lent(state: ClusterState, role: Role) -> bool:
    """Whether the policy gave all GPUs of the component to others in the open iteration."""
    iteration, held = state.iteration, state.remembered
    if iteration is None or held.assignment is None or not held.is_of(state.incarnation, iteration.plan.iteration):
        return False
    assigned = {
        Role.ACTOR: held.assignment.trainer,
        Role.ROLLOUT: held.assignment.engines,
        Role.INFERENCE: held.assignment.inference,
    }
    return not assigned[role]


def _component(role: Role, component: Component, *, is_lent: bool = False) -> control_pb2.ComponentStatus:
    return control_pb2.ComponentStatus(
        role=encode_role(role),
        lead=component.lead.instance if component.lead else "",
        lead_epoch=component.lead.epoch if component.lead else 0,
        layout=encode_layout(component.layout) if component.layout else None,
        grants=encode_grants(component.grants),
        state="up" if component.is_up else "lent" if is_lent else "down",
    )


def _summary(summary: Summary) -> control_pb2.IterationSummary:
    return control_pb2.IterationSummary(
        iteration=summary.iteration,
        incarnation=summary.incarnation,
        num_generated=summary.generated.num_samples,
        num_trained=summary.trained.num_samples,
        num_filtered=total(summary.filtered).num_samples,
        num_discarded=total(summary.discarded).num_samples,
        num_duplicates=summary.num_duplicates,
        num_lost=summary.num_lost,
        metrics=dict(summary.metrics),
    )


def _evaluation(evaluation: Evaluation) -> control_pb2.EvaluationSummary:
    return control_pb2.EvaluationSummary(
        version=evaluation.version,
        incarnation=evaluation.incarnation,
        num_prompts=evaluation.num_prompts,
        samples_per_prompt=evaluation.samples_per_prompt,
        metrics=dict(evaluation.metrics),
    )


def _lines_after(path: Path, offset: int) -> tuple[list[str], int]:
    """Whole lines from `offset` on, and the offset at which the next lines begin."""
    with path.open("rb") as stream:
        stream.seek(offset)
        content = stream.read()
    end = content.rfind(b"\n") + 1
    return content[:end].decode(errors="replace").splitlines(), offset + end


def gpu_statuses(records: Mapping[GpuId, GpuRecord]) -> list[control_pb2.GpuStatus]:
    """The ownership map as the wire has it, by name."""
    return [
        control_pb2.GpuStatus(
            gpu=gpu,
            state=record.state,
            job=record.owner.job if record.owner else "",
            role=encode_role(record.owner.role) if record.owner else types_pb2.ROLE_UNSPECIFIED,
            token=encode_token(record.token),
            transition_id=record.transition or "",
        )
        for gpu, record in sorted(records.items())
    ]


def write_endpoint(path: Path, *, endpoint: str, pid: int, credential: Path, far: str = "") -> None:
    """Write the address of the Control API, and the folder of the credential for it, to a file that only this user can
    read. `far`: its address for other machines."""
    fields = {"control": endpoint, "pid": pid, "credential": str(credential)} | ({"far": far} if far else {})
    # Whoever reads meanwhile sees the one of before.
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(json.dumps(fields) + "\n")
    partial.replace(path)
