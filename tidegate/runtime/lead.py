"""What every component's lead does alike: takes a command, works on it apart from the answer, tells what came of it.

A role's lead is a subclass that says how it scales, loads and runs its part of an iteration. Commands are taken in
order and worked on one at a time, but for an iteration, an evaluation after it, or what has to be prepared for one
(`begin`), which runs until it is done, closed or superseded. Invariants:
a command of an older incarnation is refused; a newer incarnation, a new lead, and an iteration that opens, end what
was running before, on the workers too; work that fails is told as `Failed`, never swallowed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog

from tidegate.candidates import Candidates, has_spread
from tidegate.codec import decode_grants, decode_layout, encode_grants, encode_layout, finite_only
from tidegate.events import EventBody
from tidegate.job import Job, JobFolder
from tidegate.ports.bus import SampleStream, Stage
from tidegate.ports.store import Transitions
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.cancelling import end_task
from tidegate.runtime.crew import Crew, WorkerGone, WorkerUnreachable
from tidegate.runtime.pictures import Pace, pace_of
from tidegate.types import Grant, JobId, Layout, NodeId, node_of
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2, types_pb2

Command: TypeAlias = (
    commands_pb2.ScaleUpRequest
    | commands_pb2.ScaleDownRequest
    | commands_pb2.MigrateRequest
    | commands_pb2.LoadWeightsRequest
    | commands_pb2.OpenIterationRequest
    | commands_pb2.CloseIterationRequest
    | commands_pb2.EvaluateRequest
)
Work: TypeAlias = types_pb2.IterationPlan | types_pb2.EvaluationPlan
"""What a lead does apart from its commands, until it is done, closed or superseded."""


FATAL = (ValueError, ArithmeticError, AssertionError)
"""What is wrong with the job itself: a value, a file, an arithmetic. It would be wrong again and ends the job; what a
machine or a race did (a timeout, a refusal, a lost connection) is answered by a new start."""
MAX_BREAKS = 3
"""Times in a row that an iteration may fail without a death before the job is given up: each costs a start of the
component, and what failed so often is no accident."""
_NOT_YET_DELAY_S = 1.0
_STOP_AGAIN_S = 0.5
"""Pause before a node that gave no answer is asked again to stop workers; each try waits for its own deadline first."""


class CommandRefused(RuntimeError):
    """The command cannot be taken; nothing changed. The message says what and why."""


@dataclass(frozen=True, slots=True)
class LeadTools:
    """What a lead works with."""

    node: NodeId
    job: Job
    folder: JobFolder
    crew: Crew
    samples: SampleStream
    announcer: Announcer
    transitions: Transitions

    @property
    def job_id(self) -> JobId:
        return JobId(self.job.config.job)


class Lead(ABC):
    """The lead of one component for as long as its epoch lasts."""

    can_migrate = False
    """Whether the component moves to other GPUs while it works."""
    can_change = False
    """Whether it gets some GPUs, or gives some up, while it works with others."""
    can_evaluate = False
    """Whether it generates."""

    def __init__(self, tools: LeadTools) -> None:
        self.tools = tools
        self.job = tools.job
        self.crew = tools.crew
        self.incarnation = 0
        self.iteration = 0
        self._log = structlog.get_logger(type(self).__name__)
        self._queue: asyncio.Queue[Command] = asyncio.Queue()
        self._server: asyncio.Task[None] | None = None
        self._preparation: asyncio.Task[None] | None = None
        self._iteration_task: asyncio.Task[None] | None = None
        self._stops: set[asyncio.Task[None]] = set()
        """Of workers whose node gives no answer; other commands go on."""
        self._taken: set[str] = set()
        self._is_unfinished = False
        """An iteration was opened and did not end by itself: workers may still be at it."""
        self._broken_off: Work | None = None
        """Work that failed: it is taken up again once the component, started anew, holds its weights."""
        self._num_breaks = 0
        self._took_over = False
        self._has_ended = False

    def check(self, command: Command) -> None:
        """CommandRefused when the command is of an older incarnation, or what the component never does."""
        header = command.header
        if isinstance(command, commands_pb2.MigrateRequest) and not self.can_migrate:
            raise CommandRefused(f"command {header.id}: only an actor moves while it works; start and stop the others")
        if not self.can_change and _is_change(command):
            raise CommandRefused(
                f"command {header.id}: an inference gets or gives up no part of its GPUs yet; stop it and start it"
            )
        if isinstance(command, commands_pb2.EvaluateRequest) and not self.can_evaluate:
            raise CommandRefused(f"command {header.id}: only a rollout evaluates; send it to that")
        if header.incarnation < self.incarnation:
            raise CommandRefused(
                f"command {header.id} is of incarnation {header.incarnation}, the component is at {self.incarnation}"
            )

    def take(self, command: Command) -> None:
        """Accept a command for work, in order; a repeat of one that was taken is nothing new.

        After `aclose` nothing is done: the epoch may end while its last command is being stored.
        """
        if self._has_ended or command.header.id in self._taken:
            return
        self._taken.add(command.header.id)
        if self._server is None:
            self._server = asyncio.create_task(self._serve(), name="lead")
        self._queue.put_nowait(command)

    async def aclose(self) -> None:
        """Stop leading: workers stay, what was being done is left to the next lead."""
        self._has_ended = True
        for task in (self._server, *self._stops):
            if task is not None:
                await end_task(task)
        await self._end_iteration()

    @property
    def pace(self) -> Pace:
        """Of the pictures that it tells of an iteration."""
        return pace_of(self.job.config.scheduler)

    @property
    def versions_to_keep(self) -> tuple[int, ...]:
        """Version 0 is the reference policy where there is a KL term."""
        return (0,) if self.job.config.algorithm.kl_coefficient else ()

    async def tell(self, body: EventBody, *, transition: str = "", grants: Sequence[Grant] = ()) -> None:
        """An event of this component, at its present incarnation and iteration."""
        await self.tools.announcer.tell(
            body,
            incarnation=self.incarnation,
            iteration=self.iteration,
            transition_id=transition,
            grants=grants or self.crew.members,
        )

    async def tell_progress(self, phase: str, num_done: int, num_total: int, **figures: float) -> None:
        """`figures` are the component's own metrics; those that are not finite are left out."""
        progress = events_pb2.Progress(
            phase=phase, num_done=num_done, num_total=num_total, metrics=finite_only(figures)
        )
        await self.tell(progress)

    async def tell_unreachable(self, error: WorkerGone) -> None:
        """A death is told by the worker's own instance; that an instance gives no answer, only its caller can tell."""
        if isinstance(error, WorkerUnreachable):
            await self.fail("no answer", error, grants=encode_grants(error.grants))

    async def fail(
        self, what: str, error: Exception, *, grants: Sequence[types_pb2.Grant] = (), give_up: bool = False
    ) -> None:
        """The component could not do its work: with these GPUs, or with all it has. `give_up`: it is no use again."""
        fatal = give_up or isinstance(error, FATAL)
        self._log.error("component failed", what=what, fatal=fatal, exc_info=error)
        failed = events_pb2.Failed(
            what=events_pb2.Failed.WHAT_COMPONENT, grants=grants, message=f"{what}: {error}", fatal=fatal
        )
        await self.tools.announcer.tell(failed, incarnation=self.incarnation, iteration=self.iteration)

    async def published(self, stage: Stage, plan: types_pb2.IterationPlan) -> frozenset[int]:
        """The iteration's prompts whose groups are on the stream. What lies there under other numbers is none of it."""
        found = await self.tools.samples.published(
            self.tools.job_id, stage, incarnation=self.incarnation, iteration=plan.iteration
        )
        return found & frozenset(candidates_of(plan).possible)

    async def candidates(self, stage: Stage, plan: types_pb2.IterationPlan) -> Candidates:
        """The iteration's, with the groups that are on the stream counted in."""
        candidates = candidates_of(plan)
        for prompt in sorted(await self.published(stage, plan)):
            # What is in a group matters only where it may be replaced.
            group = await self.held(stage, plan, prompt) if plan.max_extra_prompts else None
            candidates.add(prompt, has_spread=group is None or has_spread(rewards_of(group)))
        return candidates

    async def held(self, stage: Stage, plan: types_pb2.IterationPlan, prompt: int) -> samples_pb2.SampleGroup | None:
        """What the stream has of a group; None where there is none that can be read."""
        return await self.tools.samples.held(
            self.tools.job_id, stage, incarnation=self.incarnation, iteration=plan.iteration, prompt=prompt
        )

    @abstractmethod
    async def scale_up(self, request: commands_pb2.ScaleUpRequest) -> None:
        """Bring the component into the layout asked for, then `announce_layout`."""

    @abstractmethod
    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        """Load a version on all members and tell `WeightsLoaded`."""

    @abstractmethod
    async def run_iteration(self, plan: types_pb2.IterationPlan) -> None:
        """Do the component's part of an iteration and tell `IterationReported`; cancelled when it is superseded."""

    async def evaluate(self, plan: types_pb2.EvaluationPlan) -> None:
        """Evaluate the weights that a component which `can_evaluate` holds, and tell `EvaluationReported`; cancelled
        when it is superseded."""
        raise AssertionError(f"{type(self).__name__} took what it refuses: the evaluation of version {plan.version}")

    async def migrate(self, request: commands_pb2.MigrateRequest) -> None:
        """Bring a component that `can_migrate` to other GPUs, or into another layout, while it works."""
        raise AssertionError(f"{type(self).__name__} took a command that it refuses: {request.header.id}")

    async def scale_down(self, request: commands_pb2.ScaleDownRequest) -> None:
        """Stop the workers on these GPUs and tell `GpusReleased`."""
        grants = decode_grants(request.grants)
        transition = request.header.transition_id
        held = await self.crew.stop(grants, transition=transition)
        released = events_pb2.GpusReleased(grants=encode_grants(grants), held_bytes=held)
        await self.tell(released, transition=transition, grants=grants)
        if request.members:
            layout = encode_layout(decode_layout(request.layout))
            await self.tell(events_pb2.LayoutCommitted(layout=layout, grants=request.members), transition=transition)

    async def supersede(self) -> None:  # noqa: B027 - the default is to have nothing to end
        """A newer incarnation, or a new lead, begins: end what workers still do for what was before."""

    async def announce_layout(
        self, request: commands_pb2.ScaleUpRequest, *, next_iteration: int = 0, next_prompt: int = 0
    ) -> None:
        """Tell that the GPUs are acquired and the layout is in force."""
        grants, transition = decode_grants(request.grants), request.header.transition_id
        await self.tell(events_pb2.GpusAcquired(grants=request.grants), transition=transition, grants=grants)
        committed = events_pb2.LayoutCommitted(
            layout=request.layout, grants=request.members, next_iteration=next_iteration, next_prompt=next_prompt
        )
        await self.tell(committed, transition=transition, grants=decode_grants(request.members))

    async def _serve(self) -> None:
        while True:
            command = await self._queue.get()
            try:
                await self._do(command)
            except Exception as error:  # noqa: BLE001 - the edge: whatever a command's work raised is told as Failed
                await self._tell_failure(command, error)

    async def _tell_failure(self, command: Command, error: Exception) -> None:
        what = f"{type(command).__name__.removesuffix('Request')} {command.header.id}"
        if isinstance(command, commands_pb2.ScaleUpRequest):
            await self.fail(what, error, grants=command.grants)
        elif isinstance(command, commands_pb2.ScaleDownRequest) and isinstance(error, WorkerUnreachable):
            self._log.warning("stop not answered", command=command.header.id, error=str(error))
            stop = asyncio.create_task(self._stop_until_done(what, command), name=what)
            self._stops.add(stop)
            stop.add_done_callback(self._stops.discard)
        elif isinstance(error, WorkerGone):
            # What comes of a death is the scheduler's to decide.
            self._log.warning("command interrupted", command=command.header.id, error=str(error))
            await self.tell_unreachable(error)
        else:
            await self.fail(what, error)

    async def _do(self, command: Command) -> None:
        header = command.header
        if header.incarnation > self.incarnation:
            await self._end_iteration()
            self._is_unfinished = False
            self.incarnation, self._broken_off, self._num_breaks = header.incarnation, None, 0
            await self.supersede()
        self.crew.meet(header.instances)
        if not self._took_over:
            await self._take_over(header)
            await self.supersede()
            self._took_over = True
        match command:
            case commands_pb2.ScaleUpRequest():
                await self._stop_started(command)
                await self.scale_up(command)
            case commands_pb2.ScaleDownRequest():
                await self.scale_down(command)
            case commands_pb2.MigrateRequest():
                await self.migrate(command)
            case commands_pb2.LoadWeightsRequest():
                await self.load_weights(command)
                if self._broken_off is not None:
                    await self._open(self._broken_off)
            case commands_pb2.OpenIterationRequest():
                await self._open(command.plan)
            case commands_pb2.CloseIterationRequest():
                await self._close(command)
            case commands_pb2.EvaluateRequest():
                if self._iteration_task is not None:
                    # Its report is in, or it would not be asked; a new lead tells it again first.
                    await asyncio.wait([self._iteration_task])
                await self._open(command.plan)

    async def begin(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Do this while further commands are taken, such as the component's end; an iteration waits for it."""
        await self._end_iteration()
        self._preparation = asyncio.create_task(self._told(what, work), name=what)

    async def _told(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except WorkerGone as error:
            self._log.warning("interrupted", what=what, error=str(error))
            await self.tell_unreachable(error)
        except Exception as error:  # noqa: BLE001 - the edge: whatever the work raised is told as Failed
            await self.fail(what, error)

    async def _take_over(self, header: commands_pb2.CommandHeader) -> None:
        silent = await self.crew.take_over()
        gone = [grant for grant in decode_grants(header.members) if node_of(grant.gpu) in silent]
        if gone:
            nodes = ", ".join(silent)
            await self.tell_unreachable(WorkerUnreachable(f"{nodes} did not say which workers run", grants=gone))

    async def _stop_started(self, request: commands_pb2.ScaleUpRequest) -> None:
        """Workers of these grants that an earlier lead started: how far it came with them nobody knows."""
        started = [grant for grant in decode_grants(request.grants) if grant in self.crew.members]
        if started:
            await self.crew.stop(started, transition=request.header.transition_id)

    async def _stop_until_done(self, what: str, request: commands_pb2.ScaleDownRequest) -> None:
        """A node that hangs may go on, its workers with it: nobody but this lead ends them, and their GPUs wait."""
        while True:
            await asyncio.sleep(_STOP_AGAIN_S)
            try:
                return await self.scale_down(request)
            except WorkerUnreachable:
                continue
            except Exception as error:  # noqa: BLE001 - the edge: whatever a command's work raised is told as Failed
                return await self.fail(what, error)

    async def _open(self, plan: Work) -> None:
        if self._preparation is not None:
            await asyncio.wait([self._preparation])
        await self._end_iteration()
        if self._is_unfinished:
            await self.supersede()
        self.iteration, self._broken_off, self._is_unfinished = plan.iteration, None, True
        self._iteration_task = asyncio.create_task(self._guarded(plan), name="iteration")

    async def _close(self, request: commands_pb2.CloseIterationRequest) -> None:
        if self._iteration_task is not None:
            await self._iteration_task
        self._broken_off = None
        await self.close_iteration(request)

    async def close_iteration(  # noqa: B027 - the default is to hold nothing
        self, request: commands_pb2.CloseIterationRequest
    ) -> None:
        """The iteration's accounts added up: let go of what it held."""

    async def _end_iteration(self) -> None:
        for task in (self._preparation, self._iteration_task):
            if task is not None:
                await end_task(task)
        self._preparation = self._iteration_task = None

    async def _guarded(self, plan: Work) -> None:
        try:
            match plan:
                case types_pb2.IterationPlan():
                    what = f"iteration {plan.iteration}"
                    await self.run_iteration(plan)
                case types_pb2.EvaluationPlan():
                    what = f"the evaluation of version {plan.version}"
                    await self.evaluate(plan)
            self._is_unfinished, self._num_breaks = False, 0
        except WorkerGone as error:
            self._broken_off = plan
            self._log.warning("work interrupted", what=what, error=str(error))
            await self.tell_unreachable(error)
        except Exception as error:  # noqa: BLE001 - the edge: whatever an iteration raised is told as Failed
            self._broken_off = plan
            self._num_breaks += 1
            again = f" ({self._num_breaks} times in a row)" if self._num_breaks > 1 else ""
            await self.fail(f"{what}{again}", error, give_up=self._num_breaks >= MAX_BREAKS)


def _is_change(command: Command) -> bool:
    """Of a component that has GPUs besides; what clears up after a death has no transition."""
    match command:
        case commands_pb2.ScaleUpRequest():
            return len(command.members) > len(command.grants)
        case commands_pb2.ScaleDownRequest():
            return bool(command.members) and bool(command.header.transition_id)
        case _:
            return False


def candidates_of(plan: types_pb2.IterationPlan) -> Candidates:
    """Before any group is in."""
    return Candidates(plan.first_prompt, plan.num_prompts, plan.max_extra_prompts)


def rewards_of(group: samples_pb2.SampleGroup) -> list[float]:
    return [sample.reward for sample in group.samples]


def put_off_s(num_deliveries: int) -> float:
    """After which a group of what is still to come is looked at again: ever later, so that the deliveries which a
    message may have (`runtime.max_deliveries`, by default 8) last for two minutes."""
    return _NOT_YET_DELAY_S * 2.0 ** (num_deliveries - 1)


def layout_of(request: commands_pb2.ScaleUpRequest) -> Layout:
    """The layout a ScaleUp asks for."""
    return decode_layout(request.layout)
