"""The actor changes its GPUs or its layout between two updates: two phases, decided by one write in the store.

Order: who comes is started or takes its GPU; all of the world, those that stand by too, make the new layout beside the
old one; the store commits the actor's part of the transition; all switch. Invariants: before the commit any failure
leaves the old layout as it was, in force and able to train; after it there is no way back: a rank of the new layout
that does not switch is the actor's end, and one that is late, or a standby that is lost then, costs the epoch, and the
layout in force goes on in the next.
A resize after a death is the same, in an epoch without the dead: what they held is read from what they left. It has no
old layout to go back to, so that any failure of it is the actor's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from services.actor.membership import ActorWorld
from tidegate.codec import decode_grants, decode_layout, encode_layout
from tidegate.ownership import StoreNotAdopted, StoreUnavailable, Transition
from tidegate.runtime.crew import WorkerGone
from tidegate.runtime.lead import Command, LeadTools
from tidegate.types import Grant, Layout, Role, TransitionId
from tidegate.v1 import commands_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

Result = TypeVar("Result")

_ASK_AGAIN_S = 0.2
"""Pause before a store that gave no answer is asked again."""


class ResizeAborted(RuntimeError):
    """The actor is as it was; the message says why."""


class CertificatesDiffer(RuntimeError):
    """The members do not agree on what the state is: nothing is switched."""


@dataclass(frozen=True, slots=True)
class Resize:
    """`members` are those afterwards, in rank order."""

    transition: TransitionId
    coming: tuple[Grant, ...]
    leaving: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout

    @property
    def survivors(self) -> tuple[Grant, ...]:
        """Who holds the state before it: all ranks of the old layout, or those that a death left."""
        return (*(grant for grant in self.members if grant not in self.coming), *self.leaving)


def resize_of(command: Command) -> Resize | None:
    """None for a start, and for a stop of workers that takes part in no layout."""
    match command:
        case commands_pb2.MigrateRequest():
            leaving, coming = decode_grants(getattr(command, "from")), decode_grants(command.to)
        case commands_pb2.ScaleUpRequest() if len(command.members) > len(command.grants):
            leaving, coming = (), decode_grants(command.grants)
        case commands_pb2.ScaleDownRequest() if command.header.transition_id and command.members:
            leaving, coming = decode_grants(command.grants), ()
        case _:
            return None
    transition = TransitionId(command.header.transition_id)
    return Resize(transition, coming, leaving, decode_grants(command.members), decode_layout(command.layout))


class Resizing:
    """See the module. One resize at a time, with nothing else asked of the ranks meanwhile."""

    def __init__(self, tools: LeadTools, world: ActorWorld) -> None:
        self._tools = tools
        self._crew = tools.crew
        self._world = world
        self._state_epoch = 0
        self._num_reshards = 0
        self._log = structlog.get_logger("resizing")

    def began(self) -> None:
        """The ranks hold their state in the world's present epoch."""
        self._state_epoch = self._world.epoch

    async def run(self, resize: Resize, layout: Layout) -> tuple[types_pb2.ReshardReport, tuple[Grant, ...]]:
        """From `layout` on the crew's members; what it cost, and whose GPUs are free. Raises ResizeAborted; after
        anything else the actor is lost."""
        name = self._name(resize.transition)
        planned = await self._planned(resize)
        try:
            await self._bring_in(resize)
            report = await self._prepare(name, resize.layout, resize.members)
            await self._commit(planned, resize.layout)
        except Exception as error:
            self._log.warning("resize aborted", transition=resize.transition, error=str(error))
            are_in_place = await self._abort(name, resize)
            if len(resize.survivors) < layout.num_ranks:
                raise
            self._refuse_dead(resize.survivors)
            if not (are_in_place and self._world.is_whole and self._state_epoch == self._world.epoch):
                await self._enter_next(f"{resize.transition}/back", layout)
            raise ResizeAborted(f"{type(error).__name__}: {error}") from error
        have_switched = await self._switch(name, resize)
        released = await self._let_go(resize.leaving)
        self._crew.arrange(resize.members)
        if not have_switched:
            await self._enter_next(f"{resize.transition}/on", resize.layout)
        return report, released

    def _name(self, what: str) -> str:
        self._num_reshards += 1
        return f"{what}/{self._num_reshards}"

    async def _bring_in(self, resize: Resize) -> None:
        await self._crew.forget_dead()
        self._refuse_dead(resize.survivors)
        await self._world.start(resize.coming, transition=resize.transition)
        if not self._world.is_whole:
            await self._world.join()

    async def _prepare(self, name: str, layout: Layout, members: Sequence[Grant]) -> types_pb2.ReshardReport:
        """The slowest member's report; CertificatesDiffer."""
        asked = wire.PrepareReshard(id=name, layout=encode_layout(layout), ranks=self._world.ids(members))
        call = wire.WorkerCall(prepare_reshard=asked)
        replies = await self._crew.ask_all(dict.fromkeys(self._world.everyone, call))
        reports = [reply.prepared for reply in replies]
        if len({report.certificate for report in reports}) > 1:
            raise CertificatesDiffer(f"{name}: certificates {[report.certificate for report in reports]}")
        return max(reports, key=lambda report: sum(report.seconds.values()))

    async def _planned(self, resize: Resize) -> Transition:
        """ResizeAborted when it was closed while the ranks were at something else."""
        for found in await self._from_store(lambda: self._tools.transitions.transitions(self._tools.job_id)):
            if found.id == resize.transition and found.is_open:
                return found
        raise ResizeAborted(f"transition {resize.transition} is not open any more")

    async def _commit(self, planned: Transition, layout: Layout) -> None:
        """Raises VersionConflict and the like when the store will not: the transition is closed, or a GPU is lost."""
        await self._from_store(lambda: self._tools.transitions.commit(planned, Role.ACTOR, layout))

    async def _from_store(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Its answer, however long it takes: what a silent store did nobody else can tell."""
        while True:
            try:
                return await ask()
            except (StoreUnavailable, StoreNotAdopted) as error:
                self._log.warning("no answer from the store", error=str(error))
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _switch(self, name: str, resize: Resize) -> bool:
        """Raises what keeps a member of the new layout from it. False when the epoch is spent: another failed, who is
        ended, or one was late and the others gave it up."""
        replies, failed = await self._asked(_commit_of(name))
        if lost := [failed[grant] for grant in resize.members if grant in failed]:
            raise lost[0]
        self._state_epoch = self._world.epoch
        await self._stop([grant for grant in failed if grant not in resize.leaving])
        return not failed and all(reply.committed.in_epoch for reply in replies)

    async def _asked(self, call: wire.WorkerCall) -> tuple[list[wire.WorkerReply], dict[Grant, BaseException]]:
        """What those of the world reply who did it, and why the others did not."""
        asked = self._world.everyone
        outcomes = await asyncio.gather(*(self._crew.ask(grant, call) for grant in asked), return_exceptions=True)
        replies = [it for it in outcomes if not isinstance(it, BaseException)]
        return replies, {grant: it for grant, it in zip(asked, outcomes, strict=True) if isinstance(it, BaseException)}

    async def _let_go(self, leaving: Sequence[Grant]) -> tuple[Grant, ...]:
        """Who leaves stands by, or is stopped; those whose GPUs are free for sure."""
        outcomes = await asyncio.gather(*(self._crew.stand_down([grant]) for grant in leaving), return_exceptions=True)
        for grant, outcome in zip(leaving, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._log.warning("did not stand down", gpu=grant.gpu, error=str(outcome))
        told = [grant for grant, outcome in zip(leaving, outcomes, strict=True) if outcome is None]
        return (*told, *await self._stop([grant for grant in leaving if grant not in told]))

    def _refuse_dead(self, members: Sequence[Grant]) -> None:
        if dead := [grant.gpu for grant in members if grant not in self._crew.members]:
            raise WorkerGone(f"the workers of {', '.join(dead)} are dead")

    async def _abort(self, name: str, resize: Resize) -> bool:
        """Whether all that were asked say that they are where they were. Who is late, or has left the epoch, because
        another was late, does not."""
        _, failed = await self._asked(wire.WorkerCall(abort_reshard=wire.AbortReshard(id=name)))
        await self._stop(resize.coming)
        await self._crew.forget_dead()
        return not failed

    async def _enter_next(self, name: str, layout: Layout) -> None:
        """The layout in force, on the members that it has, in the next epoch."""
        members = self._crew.members
        await self._world.stand_by()
        await self._world.join()
        again = self._name(name)
        await self._prepare(again, layout, members)
        await self._crew.ask_all(dict.fromkeys(self._world.everyone, _commit_of(again)))
        self._state_epoch = self._world.epoch

    async def _stop(self, grants: Sequence[Grant]) -> tuple[Grant, ...]:
        """Those that are stopped. The others are cleared by the scheduler, which asks the gates."""
        stopped = []
        for grant in grants:
            try:
                await self._crew.stop([grant], transition="")
                stopped.append(grant)
            except Exception as error:  # noqa: BLE001 - the edge: whatever it is, the gate tells who holds the GPU
                self._log.warning("not stopped", gpu=grant.gpu, error=str(error))
        return tuple(stopped)


def _commit_of(name: str) -> wire.WorkerCall:
    return wire.WorkerCall(commit_reshard=wire.CommitReshard(id=name))
