"""The actor changes its GPUs or its layout between two updates: two phases, decided by one write in the store.

Order: who comes is started or takes its GPU; all of the world, those that stand by too, make the new layout beside the
old one; the store commits the actor's part of the transition; all switch. Invariants: before the commit any failure
leaves the old layout as it was, in force and able to train, and after it there is no way back: a living rank of the new
layout that does not switch is the actor's end, and one that is late, or a standby that is lost then, costs the epoch,
and the layout in force goes on in the next.
A rank that dies on the way is missing in the layout that is in force at the end, the old one or the new one, and its
tensors of it stay where they are. A resize after a death brings it back: it is the same, in an epoch without the dead,
and what they held is read from what they left. It has no old layout that could train: a death in it leaves one rank
more to be brought back, and any other failure is the actor's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from services.actor.all_ranks import LAST_WORDS_S
from services.actor.membership import ActorWorld
from tidegate.codec import decode_grants, decode_layout, encode_layout
from tidegate.ownership.records import StoreNotAdopted, StoreUnavailable, Transition
from tidegate.runtime.crew import WorkerGone, WorkerRefused, WorkerUnreachable
from tidegate.runtime.lead import Command, LeadTools
from tidegate.types import Grant, Layout, Role, TransitionId
from tidegate.v1 import commands_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

Result = TypeVar("Result")

_ASK_AGAIN_S = 0.2
"""Pause before a store that gave no answer is asked again."""


class ResizeAborted(RuntimeError):
    """The actor is as it was, but for ranks that died; the message says why."""


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
        await self._crew.forget_dead()
        taking_part = self._taking_part(resize)
        try:
            await self._bring_in(resize)
            report = await self._prepare(name, resize.layout, resize.members)
            await self._commit(planned, resize.layout)
        except Exception as error:
            self._log.warning("resize aborted", transition=resize.transition, error=str(error))
            await self._stay(name, resize, layout, taking_part=taking_part, error=error)
            raise ResizeAborted(f"{type(error).__name__}: {error}") from error
        self._log.info("resize committed", transition=resize.transition)
        have_switched = await self._switch(name, resize.members)
        released = await self._let_go(resize.leaving)
        members = [grant for grant in resize.members if grant in self._crew.members]
        self._crew.arrange(members)
        if not have_switched and len(members) == len(resize.members):
            await self._enter_next(f"{resize.transition}/on", resize.layout)
        return report, released

    def _name(self, what: str) -> str:
        self._num_reshards += 1
        return f"{what}/{self._num_reshards}"

    def _taking_part(self, resize: Resize) -> tuple[Grant, ...]:
        """Whose death breaks the first phase: members of before and after, and who goes on standing by."""
        coming = {grant.gpu for grant in resize.coming}
        standing_by = [grant for grant in self._crew.standbys if grant.gpu not in coming]
        return (*resize.survivors, *resize.coming, *standing_by)

    async def _bring_in(self, resize: Resize) -> None:
        self._refuse_dead(resize.survivors)
        await self._world.start(resize.coming, transition=resize.transition)
        if not self._world.is_whole:
            await self._world.join()

    async def _prepare(self, name: str, layout: Layout, members: Sequence[Grant]) -> types_pb2.ReshardReport:
        """The slowest member's report; CertificatesDiffer."""
        asked = wire.PrepareReshard(id=name, layout=encode_layout(layout), ranks=self._world.ids(members))
        calls = dict.fromkeys(self._world.everyone, wire.WorkerCall(prepare_reshard=asked))
        replies = await self._crew.ask_bound(calls, last_words_s=LAST_WORDS_S)
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

    async def _switch(self, name: str, members: Sequence[Grant]) -> bool:
        """Raises what keeps a living one of these members from it, or that none lives. False when the epoch is spent:
        somebody died or failed, and is ended, or was late and the others gave it up."""
        replies, failed = await self._asked(_commit_of(name))
        await self._crew.forget_dead()
        left = [grant for grant in members if grant in self._crew.members]
        unable = [failed[grant] for grant in left if grant in failed] or _unreachable(failed, among=members)
        if unable or not left:
            raise unable[0] if unable else WorkerGone(f"{name}: all {len(members)} members died as they switched")
        self._state_epoch = self._world.epoch
        await self._stop([grant for grant in failed if grant in self._crew.standbys])
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

    async def _stay(
        self, name: str, resize: Resize, layout: Layout, *, taking_part: Sequence[Grant], error: Exception
    ) -> None:
        """In the layout in force, without those that died. Raises the error where that cannot go on: a member gave no
        answer, none is left, or its lost ranks do not come back for another reason than a death."""
        _, failed = await self._asked(wire.WorkerCall(abort_reshard=wire.AbortReshard(id=name)))
        await self._crew.forget_dead()
        dead = [grant for grant in taking_part if grant not in self._world.everyone]
        left = [grant for grant in resize.survivors if grant not in dead]
        await self._stop(resize.coming)
        was_whole = len(resize.survivors) == layout.num_ranks
        silent = [error] if isinstance(error, WorkerUnreachable) and set(error.grants) & set(resize.survivors) else []
        if silent or _unreachable(failed, among=resize.survivors) or not left or not (was_whole or dead):
            raise error
        if len(left) < layout.num_ranks:
            return
        are_in_place = not failed and self._world.is_whole
        if not (are_in_place and self._state_epoch == self._world.epoch):
            await self._enter_next(f"{resize.transition}/back", layout)

    async def _enter_next(self, name: str, layout: Layout) -> None:
        """The layout in force, on the members that it has, in the next epoch; or in the one after, should somebody die
        who stands by. When a member dies that is left to the resize which brings it back."""
        members = self._crew.members
        await self._world.stand_by()
        while True:
            everyone = self._world.everyone
            again = self._name(name)
            try:
                await self._world.join()
                await self._prepare(again, layout, members)
                if await self._switch(again, members):
                    return
            except WorkerUnreachable:
                raise
            except (WorkerGone, WorkerRefused) as error:
                await self._crew.forget_dead()
                if self._world.everyone == everyone:
                    raise
                self._log.warning("epoch not entered", name=again, error=str(error))
            if not set(members) <= set(self._crew.members) or self._world.everyone == everyone:
                return

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


def _unreachable(failed: Mapping[Grant, BaseException], *, among: Sequence[Grant]) -> list[BaseException]:
    """What was said of those whose instance gave no answer: nobody else can tell of them."""
    return [failed[grant] for grant in among if isinstance(failed.get(grant), WorkerUnreachable)]


def _commit_of(name: str) -> wire.WorkerCall:
    return wire.WorkerCall(commit_reshard=wire.CommitReshard(id=name))
