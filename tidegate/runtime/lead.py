"""The common part of every component's lead: it takes a command, works on it after the answer, and reports the result.

A role's lead is a subclass that says how it scales, loads and runs its part of an iteration. It takes commands in order
and works on one at a time. An iteration, an evaluation after it, or a preparation for one (`begin`) runs beside the
commands until it is done, closed or superseded.

Invariants:
- A command of an older incarnation is refused. [test_lead: older_incarnation_is_refused_with_both_numbers]
- A newer incarnation ends the work that runs, on the workers too.
  [test_lead: newer_incarnation_ends_the_iteration]
- A new lead ends the work that runs, on the workers too. [test_lead: earlier_lead_left_running_is_ended]
- An iteration that opens ends the work that runs, on the workers too.
  [test_lead: iteration_that_opens_ends_the_one_before]
- Work that fails is reported as `Failed`, never swallowed. [test_lead: an_iteration_that_fails_is]
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
from tidegate.runtime.cancellation import end_task
from tidegate.runtime.crew import Crew, WorkerGone, WorkerUnreachable
from tidegate.runtime.pictures import Pace, pace_of
from tidegate.types import GpuId, Grant, JobId, Layout, NodeId, node_of
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2, types_pb2

Command: TypeAlias = (
    commands_pb2.ScaleUpRequest
    | commands_pb2.ScaleDownRequest
    | commands_pb2.MigrateRequest
    | commands_pb2.LoadWeightsRequest
    | commands_pb2.OpenIterationRequest
    | commands_pb2.CloseIterationRequest
    | commands_pb2.EvaluateRequest
    | commands_pb2.HoldTrainingRequest
    | commands_pb2.SuspendRequest
    | commands_pb2.ResumeRequest
    | commands_pb2.OrderGroupsRequest
)
Work: TypeAlias = types_pb2.IterationPlan | types_pb2.EvaluationPlan
"""The work that a lead does beside its commands, until it is done, closed or superseded."""


FATAL = (ValueError, ArithmeticError, AssertionError)
"""Errors in the job itself: a value, a file, an arithmetic. They would happen again, so they end the job.

Errors of a machine or a race (a timeout, a refusal, a lost connection) lead to a new start instead.
"""
MAX_BREAKS = 3
"""How often in a row an iteration may fail without a death before the job is given up.

Each failure costs a start of the component, and so many failures are no accident.
"""
_MAX_TAKEN = 1024
"""Commands whose repeats a lead recognises: those of some hundred iterations."""
_NOT_YET_DELAY_S = 1.0
_STOP_AGAIN_S = 0.5
"""The pause before the lead asks a silent node again to stop workers. Each try first waits for its own deadline."""


class CommandRefused(RuntimeError):
    """The command cannot be taken. Nothing changed. The message says what and why."""


@dataclass(frozen=True, slots=True)
class LeadTools:
    """The tools of a lead."""

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
    """Whether the component can move to other GPUs while it works."""
    can_suspend = False
    """Whether it can give all GPUs back and continue later with its state."""
    can_evaluate = False
    """Whether it can generate responses for an evaluation."""
    can_hold = False
    """Whether it trains, and can stop to begin minibatches."""
    can_order = False
    """Whether it works on groups in an order that it is given."""

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
        self._unanswered: dict[tuple[str, tuple[Grant, ...]], str] = {}
        """By command and grants: the last error of a stop that its node does not answer."""
        """Stops of workers whose node gives no answer. Other commands go on meanwhile."""
        self._taken: dict[str, None] = {}
        """The ids of the newest commands, in order. An older one does not come again: its iteration is over."""
        self._is_unfinished = False
        """An iteration was opened and did not end by itself: workers may still work on it."""
        self._failed_work: Work | None = None
        """Work that failed. It starts again once the component has started again and has its weights."""
        self._num_breaks = 0
        self._took_over = False
        self._has_ended = False

    def check(self, command: Command) -> None:
        """CommandRefused when the command is of an older incarnation, or the component never does it."""
        header = command.header
        if isinstance(command, commands_pb2.MigrateRequest) and not self.can_migrate:
            raise CommandRefused(f"command {header.id}: only an actor moves while it works; start and stop the others")
        if isinstance(command, commands_pb2.EvaluateRequest) and not self.can_evaluate:
            raise CommandRefused(f"command {header.id}: only a rollout evaluates; send it to that")
        if isinstance(command, commands_pb2.HoldTrainingRequest):
            if not self.can_hold:
                raise CommandRefused(f"command {header.id}: only an actor trains; send it to that")
            if (header.incarnation, command.iteration) < (self.incarnation, self.iteration):
                raise CommandRefused(f"command {header.id}: iteration {command.iteration} is not open")
        if isinstance(command, commands_pb2.SuspendRequest | commands_pb2.ResumeRequest) and not self.can_suspend:
            raise CommandRefused(
                f"command {header.id}: only an actor is suspended with its state; stop and start the others"
            )
        if isinstance(command, commands_pb2.OrderGroupsRequest) and not self.can_order:
            raise CommandRefused(f"command {header.id}: only a rollout orders its groups; send it to that")
        if header.incarnation < self.incarnation:
            raise CommandRefused(
                f"command {header.id} is of incarnation {header.incarnation}, the component is at {self.incarnation}"
            )

    def take(self, command: Command) -> None:
        """Queues a command, in order. Ignores a repeat.

        After `aclose` it does nothing: the epoch may end while its last command is being stored.
        """
        if self._has_ended or command.header.id in self._taken:
            return
        self._taken[command.header.id] = None
        if len(self._taken) > _MAX_TAKEN:
            del self._taken[next(iter(self._taken))]
        if self._server is None:
            self._server = asyncio.create_task(self._serve(), name="lead")
        self._queue.put_nowait(command)

    def repeated(self, command: Command) -> None:
        """Takes the addresses of a command that comes again: an instance may have started again meanwhile. Takes the
        command too, if its first call ended between the store's write and `take`.

        CommandRefused as of `check`.
        """
        self.crew.note_addresses(command.header.instances)
        if command.header.id not in self._taken:
            self.check(command)
            self.take(command)

    async def aclose(self) -> None:
        """Stops leading. Workers stay, and unfinished work is left to the next lead."""
        self._has_ended = True
        for task in (self._server, *self._stops):
            if task is not None:
                await end_task(task)
        await self._end_iteration()

    def check_alive(self) -> None:
        """Raises the error that ended its work on commands. Only a fault of our own does."""
        if self._server is not None and self._server.done() and not self._server.cancelled():
            self._server.result()

    @property
    def pace(self) -> Pace:
        """The pace of its pictures of an iteration."""
        return pace_of(self.job.config.scheduler)

    @property
    def versions_to_keep(self) -> tuple[int, ...]:
        """Version 0 is the reference policy where the job has a KL term."""
        return (0,) if self.job.config.algorithm.kl_coefficient else ()

    async def publish(self, body: EventBody, *, transition: str = "", grants: Sequence[Grant] = ()) -> None:
        """Publishes an event of this component, at its present incarnation and iteration."""
        await self.tools.announcer.publish(
            body,
            incarnation=self.incarnation,
            iteration=self.iteration,
            transition_id=transition,
            grants=grants or self.crew.members,
        )

    async def report_progress(self, phase: str, num_done: int, num_total: int, **figures: float) -> None:
        """`figures` are the component's own metrics. Figures that are not finite are left out."""
        progress = events_pb2.Progress(
            phase=phase, num_done=num_done, num_total=num_total, metrics=finite_only(figures)
        )
        await self.publish(progress)

    async def report_unreachable(self, error: WorkerGone) -> None:
        """Reports that an instance gave no answer, which only its caller knows. A death is its instance's to report."""
        if isinstance(error, WorkerUnreachable):
            await self.fail("no answer", error, grants=encode_grants(error.grants))

    async def fail(
        self, what: str, error: Exception, *, grants: Sequence[types_pb2.Grant] = (), give_up: bool = False
    ) -> None:
        """Reports that the component failed with these GPUs, or with all that it has. `give_up`: do not try again."""
        fatal = give_up or isinstance(error, FATAL)
        self._log.error("component failed", what=what, fatal=fatal, exc_info=error)
        failed = events_pb2.Failed(
            what=events_pb2.Failed.WHAT_COMPONENT, grants=grants, message=f"{what}: {error}", fatal=fatal
        )
        await self.tools.announcer.publish(failed, incarnation=self.incarnation, iteration=self.iteration)

    async def stored_prompts(self, stage: Stage, plan: types_pb2.IterationPlan) -> frozenset[int]:
        """The iteration's prompts whose groups are on the stream. Ignores groups of prompts outside the plan."""
        found = await self.tools.samples.published(
            self.tools.job_id, stage, incarnation=self.incarnation, iteration=plan.iteration
        )
        return found & frozenset(candidates_of(plan).possible)

    async def candidates(self, stage: Stage, plan: types_pb2.IterationPlan) -> Candidates:
        """The iteration's candidates, with the groups that are on the stream counted in."""
        candidates = candidates_of(plan)
        for prompt in sorted(await self.stored_prompts(stage, plan)):
            # The contents of a group matter only where it may be replaced.
            group = await self.stored_group(stage, plan, prompt) if plan.max_extra_prompts else None
            candidates.add(prompt, has_spread=group is None or has_spread(rewards_of(group)))
        return candidates

    async def stored_group(
        self, stage: Stage, plan: types_pb2.IterationPlan, prompt: int
    ) -> samples_pb2.SampleGroup | None:
        """The group on the stream. None where there is none that can be read."""
        return await self.tools.samples.stored_group(
            self.tools.job_id, stage, incarnation=self.incarnation, iteration=plan.iteration, prompt=prompt
        )

    @abstractmethod
    async def scale_up(self, request: commands_pb2.ScaleUpRequest) -> None:
        """Brings the component into the layout of the request, then calls `announce_layout`."""

    @abstractmethod
    async def load_weights(self, request: commands_pb2.LoadWeightsRequest) -> None:
        """Loads a version on all members and publishes `WeightsLoaded`."""

    @abstractmethod
    async def run_iteration(self, plan: types_pb2.IterationPlan) -> None:
        """Does the component's part of an iteration and publishes `IterationReported`. Cancelled when superseded."""

    async def evaluate(self, plan: types_pb2.EvaluationPlan) -> None:
        """Evaluates the weights of a component that `can_evaluate`, and publishes `EvaluationReported`.

        Cancelled when superseded.
        """
        raise AssertionError(f"{type(self).__name__} took what it refuses: the evaluation of version {plan.version}")

    def hold_training(self, request: commands_pb2.HoldTrainingRequest) -> None:
        """Lets a component that `can_hold` begin no further minibatch of the iteration, or go on."""
        raise AssertionError(f"{type(self).__name__} took a command that it refuses: {request.header.id}")

    async def migrate(self, request: commands_pb2.MigrateRequest) -> None:
        """Moves a component that `can_migrate` to other GPUs, or into another layout, while it works."""
        raise AssertionError(f"{type(self).__name__} took a command that it refuses: {request.header.id}")

    async def suspend(self, request: commands_pb2.SuspendRequest) -> None:
        """Gives all GPUs of a component that `can_suspend` back, and keeps its state."""
        raise AssertionError(f"{type(self).__name__} took a command that it refuses: {request.header.id}")

    async def resume(self, request: commands_pb2.ResumeRequest) -> None:
        """Continues with the state that `suspend` kept."""
        raise AssertionError(f"{type(self).__name__} took a command that it refuses: {request.header.id}")

    async def order_groups(self, request: commands_pb2.OrderGroupsRequest) -> None:
        """Takes the order of the groups of an iteration, for a component that `can_order`."""
        raise AssertionError(f"{type(self).__name__} took a command that it refuses: {request.header.id}")

    async def scale_down(self, request: commands_pb2.ScaleDownRequest) -> None:
        """Lets go of these GPUs and publishes `GpusReleased`."""
        grants = decode_grants(request.grants)
        transition = request.header.transition_id
        held_bytes = await self.let_go(grants, transition=transition)
        self._unanswered.pop((request.header.id, tuple(grants)), None)
        released = events_pb2.GpusReleased(grants=encode_grants(grants), held_bytes=held_bytes)
        await self.publish(released, transition=transition, grants=grants)
        if request.members:
            layout = encode_layout(decode_layout(request.layout))
            committed = events_pb2.LayoutCommitted(layout=layout, grants=request.members)
            await self.publish(committed, transition=transition)

    async def let_go(self, grants: Sequence[Grant], *, transition: str) -> int:
        """Ends the workers on these GPUs. Returns the bytes of device memory still in use."""
        return await self.crew.stop(grants, transition=transition)

    async def supersede(self) -> None:  # noqa: B027 - the default is to have nothing to end
        """Ends the earlier work of the workers, because a newer incarnation or a new lead begins."""

    async def announce_layout(
        self, request: commands_pb2.ScaleUpRequest, *, next_iteration: int = 0, next_prompt: int = 0
    ) -> None:
        """Publishes that the GPUs are acquired and the layout is in force."""
        grants, transition = decode_grants(request.grants), request.header.transition_id
        await self.publish(events_pb2.GpusAcquired(grants=request.grants), transition=transition, grants=grants)
        committed = events_pb2.LayoutCommitted(
            layout=request.layout, grants=request.members, next_iteration=next_iteration, next_prompt=next_prompt
        )
        await self.publish(committed, transition=transition, grants=decode_grants(request.members))

    async def _serve(self) -> None:
        while True:
            command = await self._queue.get()
            try:
                await self._do(command)
            except Exception as error:  # noqa: BLE001 - the edge: every error of a command becomes a Failed event
                await self._report_failure(command, error)

    async def _report_failure(self, command: Command, error: Exception) -> None:
        what = f"{type(command).__name__.removesuffix('Request')} {command.header.id}"
        if isinstance(command, commands_pb2.ScaleUpRequest):
            await self.fail(what, error, grants=command.grants)
        elif isinstance(command, commands_pb2.ScaleDownRequest) and isinstance(error, WorkerUnreachable):
            self._log_unanswered(command, error)
            for part in _by_node(command):
                stop = asyncio.create_task(self._stop_until_done(what, part), name=what)
                self._stops.add(stop)
                stop.add_done_callback(self._stops.discard)
        elif isinstance(error, WorkerGone):
            # The scheduler decides what follows from a death.
            self._log.warning("command interrupted", command=command.header.id, error=str(error))
            await self.report_unreachable(error)
        else:
            await self.fail(what, error)

    def _log_unanswered(self, command: commands_pb2.ScaleDownRequest, error: WorkerUnreachable) -> None:
        """Log the error if it has changed. A component may report each try of a stop here."""
        stop = (command.header.id, error.grants)
        if self._unanswered.get(stop) != str(error):
            self._unanswered[stop] = str(error)
            self._log.warning("stop not answered", command=command.header.id, error=str(error))

    async def _do(self, command: Command) -> None:
        header = command.header
        if header.incarnation > self.incarnation:
            await self._end_iteration()
            self._is_unfinished = False
            self.incarnation, self._failed_work, self._num_breaks = header.incarnation, None, 0
            await self.supersede()
        self.crew.note_addresses(header.instances)
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
            case commands_pb2.SuspendRequest():
                await self.suspend(command)
            case commands_pb2.ResumeRequest():
                await self.resume(command)
            case commands_pb2.LoadWeightsRequest():
                await self.load_weights(command)
                if self._failed_work is not None:
                    await self._open(self._failed_work)
            case commands_pb2.OpenIterationRequest():
                await self._open(command.plan)
            case commands_pb2.CloseIterationRequest():
                await self._close(command)
            case commands_pb2.EvaluateRequest():
                if self._iteration_task is not None:
                    # The iteration's report is in, or this command would not come. A new lead repeats the report first.
                    await asyncio.wait([self._iteration_task])
                await self._open(command.plan)
            case commands_pb2.HoldTrainingRequest():
                self.hold_training(command)
            case commands_pb2.OrderGroupsRequest():
                await self.order_groups(command)

    async def begin(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts work beside further commands, such as the end of the component. An iteration waits for it."""
        await self._end_iteration()
        self._preparation = asyncio.create_task(self._prepare(what, work), name=what)

    async def _prepare(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except WorkerGone as error:
            self._log.warning("interrupted", what=what, error=str(error))
            await self.report_unreachable(error)
        except Exception as error:  # noqa: BLE001 - the edge: every error of the work becomes a Failed event
            await self.fail(what, error)

    async def _take_over(self, header: commands_pb2.CommandHeader) -> None:
        silent = await self.crew.take_over()
        gone = [grant for grant in decode_grants(header.members) if node_of(grant.gpu) in silent]
        if gone:
            nodes = ", ".join(silent)
            await self.report_unreachable(WorkerUnreachable(f"{nodes} did not say which workers run", grants=gone))

    async def _stop_started(self, request: commands_pb2.ScaleUpRequest) -> None:
        """Stops workers of these grants that an earlier lead started: nobody knows how far their start came."""
        started = [grant for grant in decode_grants(request.grants) if grant in self.crew.members]
        if started:
            await self.crew.stop(started, transition=request.header.transition_id)

    async def _stop_until_done(self, what: str, request: commands_pb2.ScaleDownRequest) -> None:
        """Asks one node again and again: if it hangs, it may go on with its workers, and only this lead ends them."""
        while True:
            await asyncio.sleep(_STOP_AGAIN_S)
            try:
                return await self.scale_down(request)
            except WorkerUnreachable:
                continue
            except Exception as error:  # noqa: BLE001 - the edge: every error of a command becomes a Failed event
                return await self.fail(what, error)

    async def _open(self, plan: Work) -> None:
        if self._preparation is not None:
            await asyncio.wait([self._preparation])
        await self._end_iteration()
        if self._is_unfinished:
            await self.supersede()
        self.iteration, self._failed_work, self._is_unfinished = plan.iteration, None, True
        self._iteration_task = asyncio.create_task(self._guarded(plan), name="iteration")

    async def _close(self, request: commands_pb2.CloseIterationRequest) -> None:
        if self._iteration_task is not None:
            await self._iteration_task
        self._failed_work = None
        await self.close_iteration(request)

    async def close_iteration(  # noqa: B027 - the default is to hold nothing
        self, request: commands_pb2.CloseIterationRequest
    ) -> None:
        """The iteration's accounts are complete: release what the component kept for them."""

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
            self._failed_work = plan
            self._log.warning("work interrupted", what=what, error=str(error))
            await self.report_unreachable(error)
        except Exception as error:  # noqa: BLE001 - the edge: every error of an iteration becomes a Failed event
            self._failed_work = plan
            self._num_breaks += 1
            again = f" ({self._num_breaks} times in a row)" if self._num_breaks > 1 else ""
            await self.fail(f"{what}{again}", error, give_up=self._num_breaks >= MAX_BREAKS)


def _by_node(request: commands_pb2.ScaleDownRequest) -> list[commands_pb2.ScaleDownRequest]:
    """One request for each node, so that a node without an answer keeps no GPU of another from its release."""
    parts: dict[NodeId, commands_pb2.ScaleDownRequest] = {}
    for grant in request.grants:
        node = node_of(GpuId(grant.gpu))
        if node not in parts:
            parts[node] = commands_pb2.ScaleDownRequest()
            parts[node].CopyFrom(request)
            del parts[node].grants[:]
        parts[node].grants.append(grant)
    return list(parts.values())


def candidates_of(plan: types_pb2.IterationPlan) -> Candidates:
    """The candidates before any group has arrived."""
    return Candidates(plan.first_prompt, plan.num_prompts, plan.max_extra_prompts)


def rewards_of(group: samples_pb2.SampleGroup) -> list[float]:
    return [sample.reward for sample in group.samples]


def redelivery_delay_s(num_deliveries: int) -> float:
    """The delay before a group of a later iteration is looked at again. It doubles each time.

    So the deliveries that a message may have (`runtime.max_deliveries`, by default 8) last for two minutes.
    """
    return _NOT_YET_DELAY_S * 2.0 ** (num_deliveries - 1)


def layout_of(request: commands_pb2.ScaleUpRequest) -> Layout:
    """The layout of a ScaleUp request."""
    return decode_layout(request.layout)
