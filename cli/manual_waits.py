"""Waits for the end of a manual move: follows the job's events until the components are where a person asked for them.

The events say when a component is there. A move also ends without one: at its deadline, or with a request that took its
place. So where events are silent the scheduler's state is asked too.

Invariants:
- A wait ends with the move or with the job, across restarts of the scheduler.
  [test_scaling: a_wait_goes_on_while_the_scheduler]
- When a wait ends, the scheduler knows of the move, and a next command builds on it.
  [test_scaling: ends_once_the_scheduler_has_applied]
- A move that did not happen ends the wait with the reason. [test_scaling: that_failed_ends_with_1]
- A drain of GPUs that the job uses after all ends the wait with that reason.
  [test_manual_commands: uses_after_all]
- A wait for a drain does not end while an open transition holds a GPU of it.
  [test_manual_commands: in_an_open_transition]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from cli import job_streams
from cli.job_access import control_of
from tidegate.codec import decode_layout
from tidegate.events import is_figure
from tidegate.job import JobFolder
from tidegate.launcher.control import NotRunning
from tidegate.launcher.outcome import role_name
from tidegate.ownership.records import GpuState
from tidegate.ports.rpc import PeerUnavailable
from tidegate.types import Layout
from tidegate.v1 import control_pb2, events_pb2, types_pb2

QUIET_S = 2.0
"""Without an event for this long, the state is asked. An end that an event shows is seen at once; only one without an
event, a deadline of minutes, is seen this much later."""
_APPLIES_S = 0.05
"""The scheduler applies an event within milliseconds."""
_APPLIED_S = 5.0


class NotMoved(RuntimeError):
    """The move has ended, and the components did not get there. The text has the reason."""


@dataclass(frozen=True, slots=True)
class Place:
    role: str
    layout: Layout
    gpus: tuple[str, ...]

    @classmethod
    def of(cls, place: types_pb2.RolePlace) -> Place:
        return cls(role_name(place.role), decode_layout(place.layout), tuple(place.gpus))

    def __str__(self) -> str:
        return f"{self.layout} on {', '.join(self.gpus)}"

    def is_in(self, at_work: tuple[Layout | None, tuple[str, ...]]) -> bool:
        """Whether the component is here. Ranks have an order in the actor alone."""
        layout, gpus = at_work
        return layout == self.layout and (gpus == self.gpus or (self.role != "actor" and set(gpus) == set(self.gpus)))


@dataclass(frozen=True, slots=True)
class Goal:
    """`places`: where components are to be. `drained`: the GPUs that no component is to have."""

    places: tuple[Place, ...] = ()
    drained: frozenset[str] = frozenset()

    @property
    def failure(self) -> str:
        """What did not happen, for people."""
        if self.drained:
            return f"{', '.join(sorted(self.drained))} were not given back"
        return "its components did not get to " + "; ".join(f"{place.role} {place}" for place in self.places)

    def used_of(self, status: control_pb2.GetJobResponse) -> list[str]:
        """The drained GPUs that the scheduler decided to use after all."""
        return sorted(self.drained.intersection(status.used_drained_gpus))

    def is_open(self, status: control_pb2.GetJobResponse) -> bool:
        """Whether the scheduler still brings it about."""
        if self.drained:
            return self.drained <= set(status.drained_gpus) and not self.used_of(status)
        asked = [Place.of(place) for place in status.open_places]
        return any(place in asked for place in self.places)


@dataclass(slots=True)
class _Course:
    """Where the components are, and what happened to the request, by the events so far."""

    goal: Goal
    sequence: int
    at_work: dict[str, tuple[Layout | None, tuple[str, ...]]] = field(default_factory=dict)
    seen: int = 0
    why: str = "it was not done by its deadline"

    def start(self, status: control_pb2.GetJobResponse) -> None:
        self.seen = status.applied_sequence
        for each in status.components:
            layout = decode_layout(each.layout) if each.HasField("layout") else None
            self.at_work[role_name(each.role)] = (layout, tuple(grant.gpu for grant in each.grants))

    def take(self, row: control_pb2.ListEventsResponse) -> None:
        event = row.event
        match event.WhichOneof("body"):
            case "layout_committed" if row.stream_sequence > self.seen:
                committed = event.layout_committed
                gpus = tuple(grant.gpu for grant in committed.grants)
                self.at_work[event.source.partition("@")[0]] = (decode_layout(committed.layout), gpus)
            case "gpus_released" if row.stream_sequence > self.seen:
                self._leave(event)
            case "resize_failed":
                self.why = event.resize_failed.message
            case "split_requested" | "resize_requested" | "drain_requested" if row.stream_sequence > self.sequence:
                self.why = "a later request replaced it"

    def _leave(self, event: events_pb2.Event) -> None:
        role = event.source.partition("@")[0]
        layout, gpus = self.at_work.get(role, (None, ()))
        left = {grant.gpu for grant in event.gpus_released.grants}
        kept = tuple(gpu for gpu in gpus if gpu not in left)
        self.at_work[role] = (layout if kept else None, kept)

    @property
    def is_reached(self) -> bool:
        if self.goal.drained:
            return all(self.goal.drained.isdisjoint(gpus) for _, gpus in self.at_work.values())
        return all(place.is_in(self.at_work.get(place.role, (None, ()))) for place in self.goal.places)


async def until_reached(folder: JobFolder, goal: Goal, *, sequence: int) -> None:
    """Returns when the components are there. `sequence`: of the request's event. NotMoved: they are not, and will not
    be; NotRunning: the run was killed."""
    course = _Course(goal, sequence)
    async with aclosing(_news(folder, sequence)) as news:
        async for row in news:
            if row is not None:
                course.take(row)
            if course.at_work and course.is_reached:
                await until_applied(folder, row.stream_sequence if row is not None else sequence)
                return
            if (row is None or not course.at_work) and await _has_ended(folder, course):
                break
    if course.at_work and course.is_reached:
        return
    async for row in job_streams.events(folder, follow=False, after_sequence=sequence):
        course.take(row)
    why = job_streams.end_line(folder) if folder.result.exists() else course.why
    raise NotMoved(f"job {folder.root.name}: {goal.failure}: {why}")


async def until_given_back(folder: JobFolder, goal: Goal, *, sequence: int) -> None:
    """Returns when nobody has the drained GPUs. One in an open transition goes where that brings it, and then back.
    The store closes a transition without an event, so it is asked until it has. Raises as `until_reached`."""
    await until_reached(folder, goal, sequence=sequence)
    while await held_of(folder, goal.drained):
        await asyncio.sleep(_APPLIES_S)
        await until_reached(folder, goal, sequence=sequence)


async def held_of(folder: JobFolder, gpus: Collection[str]) -> list[str]:
    """Those of the GPUs that a component owns or an open transition holds; none once the job is over."""
    try:
        async with control_of(folder) as control:
            rows = (await control.ListGpus(control_pb2.ListGpusRequest(job=folder.root.name))).gpus
    except (NotRunning, PeerUnavailable):
        if not job_streams.goes_on_or_is_over(folder):
            raise
        return [] if folder.result.exists() else sorted(gpus)
    return [row.gpu for row in rows if row.gpu in gpus and (row.state == GpuState.OWNED or row.transition_id)]


async def until_applied(folder: JobFolder, sequence: int) -> None:
    """Returns when the scheduler has applied the events up to this one: the next command builds on its state. It waits
    `_APPLIED_S` at most: a scheduler that starts again applies them later."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_APPLIED_S):
            while True:
                if folder.result.exists() or await _applied(folder) >= sequence:
                    return
                await asyncio.sleep(_APPLIES_S)


async def _applied(folder: JobFolder) -> int:
    """The last event that the scheduler has applied; 0 while it starts again."""
    try:
        async with control_of(folder) as control:
            return (await control.GetJob(control_pb2.GetJobRequest(job=folder.root.name))).applied_sequence
    except (NotRunning, PeerUnavailable):
        if not job_streams.goes_on_or_is_over(folder):
            raise
        return 0


async def _has_ended(folder: JobFolder, course: _Course) -> bool:
    """Asks the scheduler. What it has applied counts from then on, and later events on top of it."""
    try:
        async with control_of(folder) as control:
            status = await control.GetJob(control_pb2.GetJobRequest(job=folder.root.name))
    except (NotRunning, PeerUnavailable):
        if not job_streams.goes_on_or_is_over(folder):
            raise
        return folder.result.exists()
    course.start(status)
    if course.goal.used_of(status):
        course.why = "a component would have no copy without them, so it uses them"
    return status.applied_sequence >= course.sequence and not course.goal.is_open(status)


async def _news(folder: JobFolder, sequence: int) -> AsyncGenerator[control_pb2.ListEventsResponse | None, None]:
    """The job's events from the request on, without figures; None at first and wherever they are silent. It ends with
    the job."""
    yield None
    async with aclosing(job_streams.events(folder, follow=True, after_sequence=sequence - 1)) as rows:
        coming = asyncio.ensure_future(anext(rows, None))
        try:
            while True:
                done, _ = await asyncio.wait([coming], timeout=QUIET_S)
                if not done:
                    yield None
                    continue
                row = coming.result()
                if row is None:
                    return
                coming = asyncio.ensure_future(anext(rows, None))
                if not is_figure(row.event):
                    yield row
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
