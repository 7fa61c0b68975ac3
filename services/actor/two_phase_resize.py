"""A resize of the actor between two portions, in two phases. One write in the store decides between them.

A resize changes the actor's GPUs or its layout, in these steps:
1. The arriving members start, or standbys take their GPUs.
2. All members of the world, standbys included, prepare the new layout beside the old one.
3. The store commits the actor's part of the transition.
4. All members switch.

After the commit there is no way back. The actor fails if a living rank of the new layout does not switch. If a rank is
late, or a standby is lost, the epoch is spent: the new layout continues in the next one.

Deaths:
- A rank that dies during a resize is missing in the layout that is in force at its end, the old one or the new one.
  Its tensors of that layout stay where they are.
- A later resize replaces the rank. It takes the same steps, in an epoch without the dead members, and reads their
  tensors from what they left.
- Such a resize has no old layout that could train. Another death in it leaves one more rank to replace; any other
  failure ends the actor.

Invariants:
- A failure before the commit leaves the old layout in force and able to train.
  [test_two_phase_resize: one_member_cannot_prepare]
- A living rank that does not switch after the commit ends the incarnation.
  [test_two_phase_resize: does_not_switch_after]
- A rank that is late at the switch costs only an epoch. [test_two_phase_resize: late_at_the_switch]
- A standby that is lost at the switch costs only an epoch.
  [test_two_phase_resize: standby_that_is_lost_as_the_others_switch]
- Portions are kept only where one epoch lasts from their training to the end of the switch.
  [test_streaming: into_another_epoch_drops] [test_streaming: goes_on_after_resizes]
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
"""The pause before a request is repeated to a store that gave no answer."""


class ResizeAborted(RuntimeError):
    """The resize failed: the actor is as before, except for ranks that died. The message gives the reason."""


class CertificatesDiffer(RuntimeError):
    """The members' state certificates differ, so none of them switches."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A request for a resize. `members` are the members after it, in rank order."""

    transition: TransitionId
    coming: tuple[Grant, ...]
    leaving: tuple[Grant, ...]
    members: tuple[Grant, ...]
    layout: Layout

    @property
    def survivors(self) -> tuple[Grant, ...]:
        """The members that hold the state before the resize: the old layout's ranks, except the dead ones."""
        return (*(grant for grant in self.members if grant not in self.coming), *self.leaving)


def resize_of(command: Command) -> Resize | None:
    """The command's resize. None for a start, and for a stop of workers that are in no layout."""
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


@dataclass(frozen=True, slots=True)
class Resized:
    """A committed resize.

    report: the slowest member's.
    released: the grants of the free GPUs.
    keeps_portions: whether the new layout has the gradients of the portions.
    """

    report: types_pb2.ReshardReport
    released: tuple[Grant, ...]
    keeps_portions: bool


class TwoPhaseResize:
    """Runs resizes, one at a time; see the module. The caller sends the ranks no other request meanwhile."""

    def __init__(self, tools: LeadTools, world: ActorWorld) -> None:
        self._tools = tools
        self._crew = tools.crew
        self._world = world
        self._state_epoch = 0
        self._num_reshards = 0
        self._log = structlog.get_logger("resize")

    def note_start(self) -> None:
        """Note that the ranks hold their state in the world's present epoch."""
        self._state_epoch = self._world.epoch

    async def run(self, resize: Resize, layout: Layout, *, portions: Sequence[wire.Accumulate] = ()) -> Resized:
        """Resize from `layout` on the crew's members. `portions`: those of the open minibatch, to be carried where the
        epoch stays.

        Raises ResizeAborted; then the portions are lost. After any other exception the actor's state is lost."""
        name = self.new_name(resize.transition)
        planned = await self.planned(resize.transition)
        await self._crew.forget_dead()
        taking_part = self._taking_part(resize)
        try:
            stays_in_epoch = await self._bring_in(resize)
            carried = portions if stays_in_epoch else ()
            report = await self.prepare(name, resize.layout, resize.members, portions=carried)
            await self._commit(planned, resize.layout)
        except Exception as error:
            self._log.warning("resize aborted", transition=resize.transition, error=str(error))
            await self._roll_back(name, resize, layout, taking_part=taking_part, error=error)
            raise ResizeAborted(f"{type(error).__name__}: {error}") from error
        self._log.info("resize committed", transition=resize.transition)
        is_epoch_whole = await self.switch(name, resize.members)
        released = await self.release(resize.leaving)
        members = [grant for grant in resize.members if grant in self._crew.members]
        self._crew.arrange(members)
        if not is_epoch_whole and len(members) == len(resize.members):
            await self.enter_next(f"{resize.transition}/on", resize.layout)
        return Resized(report, released, keeps_portions=bool(carried) and is_epoch_whole)

    def new_name(self, what: str) -> str:
        self._num_reshards += 1
        return f"{what}/{self._num_reshards}"

    def _taking_part(self, resize: Resize) -> tuple[Grant, ...]:
        """The workers whose death aborts the first phase: members before and after, and standbys that stay standbys."""
        coming = {grant.gpu for grant in resize.coming}
        standing_by = [grant for grant in self._crew.standbys if grant.gpu not in coming]
        return (*resize.survivors, *resize.coming, *standing_by)

    async def _bring_in(self, resize: Resize) -> bool:
        """Start the members that come. Returns whether the epoch is the same as before."""
        self._refuse_dead(resize.survivors)
        await self._world.start(resize.coming, transition=resize.transition)
        if self._world.is_whole:
            return self._world.epoch == self._state_epoch
        await self._world.join()
        return False

    async def prepare(
        self, name: str, layout: Layout, members: Sequence[Grant], *, portions: Sequence[wire.Accumulate] = ()
    ) -> types_pb2.ReshardReport:
        """Have all prepare. Returns the slowest member's report. Raises CertificatesDiffer."""
        request = wire.PrepareReshard(
            id=name, layout=encode_layout(layout), ranks=self._world.ids(members), portions=portions
        )
        calls = dict.fromkeys(self._world.everyone, wire.WorkerCall(prepare_reshard=request))
        replies = await self._crew.ask_interdependent(calls, last_words_s=LAST_WORDS_S)
        reports = [reply.prepared for reply in replies]
        if len({report.certificate for report in reports}) > 1:
            raise CertificatesDiffer(f"{name}: certificates {[report.certificate for report in reports]}")
        return max(reports, key=lambda report: sum(report.seconds.values()))

    async def planned(self, transition: TransitionId) -> Transition:
        """The open transition. Raises ResizeAborted when it was closed while the ranks were busy."""
        for found in await self._from_store(lambda: self._tools.transitions.current_transitions(self._tools.job_id)):
            if found.id == transition and found.is_open:
                return found
        raise ResizeAborted(f"transition {transition} is not open any more")

    async def _commit(self, planned: Transition, layout: Layout) -> None:
        """Raises VersionConflict and the like where the transition is closed or a GPU is lost."""
        await self._from_store(lambda: self._tools.transitions.commit(planned, Role.ACTOR, layout))

    async def _from_store(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """The store's answer, however long it takes: only the store knows whether the commit took effect."""
        while True:
            try:
                return await ask()
            except (StoreUnavailable, StoreNotAdopted) as error:
                self._log.warning("no answer from the store", error=str(error))
                await asyncio.sleep(_ASK_AGAIN_S)

    async def switch(self, name: str, members: Sequence[Grant]) -> bool:
        """Switch all to the prepared layout. Returns False when the epoch is spent.

        The epoch is spent if a worker died, if a standby failed and was stopped, or if a rank was late and its peers
        left it. Raises the error of a living member that did not switch; raises WorkerGone if no member lives."""
        replies, failed = await self.ask_each(self._world.everyone, _commit_of(name))
        await self._crew.forget_dead()
        living = [grant for grant in members if grant in self._crew.members]
        unable = [failed[grant] for grant in living if grant in failed] or _unreachable(failed, among=members)
        if unable or not living:
            raise unable[0] if unable else WorkerGone(f"{name}: all {len(members)} members died at the switch")
        self._state_epoch = self._world.epoch
        await self.stop([grant for grant in failed if grant in self._crew.standbys])
        return not failed and all(reply.committed.in_epoch for reply in replies)

    async def ask_each(
        self, grants: Sequence[Grant], call: wire.WorkerCall
    ) -> tuple[list[wire.WorkerReply], dict[Grant, BaseException]]:
        """The replies of the workers that did the call, and the errors of the others by grant."""
        outcomes = await asyncio.gather(*(self._crew.ask(grant, call) for grant in grants), return_exceptions=True)
        replies = [it for it in outcomes if not isinstance(it, BaseException)]
        return replies, {grant: it for grant, it in zip(grants, outcomes, strict=True) if isinstance(it, BaseException)}

    async def release(self, leaving: Sequence[Grant]) -> tuple[Grant, ...]:
        """Make leaving workers standbys, or stop them. Returns the grants of the GPUs that are certainly free."""
        outcomes = await asyncio.gather(*(self._crew.stand_down([grant]) for grant in leaving), return_exceptions=True)
        for grant, outcome in zip(leaving, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._log.warning("did not stand down", gpu=grant.gpu, error=str(outcome))
        stood_down = [grant for grant, outcome in zip(leaving, outcomes, strict=True) if outcome is None]
        return (*stood_down, *await self.stop([grant for grant in leaving if grant not in stood_down]))

    def _refuse_dead(self, members: Sequence[Grant]) -> None:
        if dead := [grant.gpu for grant in members if grant not in self._crew.members]:
            raise WorkerGone(f"the workers of {', '.join(dead)} are dead")

    async def _roll_back(
        self, name: str, resize: Resize, layout: Layout, *, taking_part: Sequence[Grant], error: Exception
    ) -> None:
        """Return to the layout in force, without the dead members.

        Raises the error where that layout cannot go on: a member gave no answer, no member is left, or the layout
        lacked a rank before the resize and no further death explains the failure."""
        abort = wire.WorkerCall(abort_reshard=wire.AbortReshard(id=name))
        _, failed = await self.ask_each(self._world.everyone, abort)
        await self._crew.forget_dead()
        dead = [grant for grant in taking_part if grant not in self._world.everyone]
        living = [grant for grant in resize.survivors if grant not in dead]
        await self.stop(resize.coming)
        was_whole = len(resize.survivors) == layout.num_ranks
        silent = [error] if isinstance(error, WorkerUnreachable) and set(error.grants) & set(resize.survivors) else []
        if silent or _unreachable(failed, among=resize.survivors) or not living or not (was_whole or dead):
            raise error
        if len(living) < layout.num_ranks:
            # The resize that replaces the dead rank makes the next epoch.
            return
        are_in_place = not failed and self._world.is_whole
        if not (are_in_place and self._state_epoch == self._world.epoch):
            await self.enter_next(f"{resize.transition}/back", layout)

    async def enter_next(self, name: str, layout: Layout) -> None:
        """Bring the layout in force, on its present members, into the next epoch.

        If a standby dies on the way, try the epoch after that. If a member dies, stop: the resize that replaces the
        member makes the next epoch."""
        members = self._crew.members
        await self._world.stand_by()
        while True:
            everyone = self._world.everyone
            attempt = self.new_name(name)
            try:
                await self._world.join()
                await self.prepare(attempt, layout, members)
                if await self.switch(attempt, members):
                    return
            except WorkerUnreachable:
                raise
            except (WorkerGone, WorkerRefused) as error:
                await self._crew.forget_dead()
                if self._world.everyone == everyone:
                    raise
                self._log.warning("epoch not entered", name=attempt, error=str(error))
            if not set(members) <= set(self._crew.members) or self._world.everyone == everyone:
                return

    def raise_unreachable(self, failed: Mapping[Grant, BaseException], *, among: Sequence[Grant]) -> None:
        """Raise the error of a member whose instance gave no answer: nothing else shows whether it lives."""
        for error in _unreachable(failed, among=among):
            raise error

    async def stop(self, grants: Sequence[Grant]) -> tuple[Grant, ...]:
        """The grants whose workers stopped. The scheduler clears the others, by asking the gates."""
        stopped = []
        for grant in grants:
            try:
                await self._crew.stop([grant], transition="")
                stopped.append(grant)
            except Exception as error:  # noqa: BLE001 - the edge: after any error the gate knows who holds the GPU
                self._log.warning("not stopped", gpu=grant.gpu, error=str(error))
        return tuple(stopped)


def _unreachable(failed: Mapping[Grant, BaseException], *, among: Sequence[Grant]) -> list[BaseException]:
    """The errors of members whose instance gave no answer. Nothing else shows whether such a member lives."""
    return [failed[grant] for grant in among if isinstance(failed.get(grant), WorkerUnreachable)]


def _commit_of(name: str) -> wire.WorkerCall:
    return wire.WorkerCall(commit_reshard=wire.CommitReshard(id=name))
