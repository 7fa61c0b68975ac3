"""The actor gives all its GPUs back, keeps its state in host memory, and continues later on any GPUs in any layout.

Suspend, between two updates:
1. All workers have their part of the state in host memory. Nothing else changes yet.
2. The transition must still be open: past its deadline the actor keeps its GPUs.
3. All workers give their devices' memory back.
4. The ranks become standbys, which keep the state. Their GPUs are free.

Resume:
1. Standbys on the new GPUs take them, or new workers start there. Without a change of members the epoch goes on.
2. All prepare the new layout, whose source is the state in host memory: one reshard, whatever the old layout was.
3. The transition must still be open.
4. All switch.

A rank that died, before or meanwhile, is missing as in a resize: its part is read from what it left in its node's
memory.

Invariants:
- A suspension that fails before its third step leaves the actor as it was.
  [test_suspension: one_rank_cannot_keep_leaves_the_actor]
- A resumption that fails before its switch leaves the state in host memory and the GPUs free.
  [test_suspension: cannot_be_prepared_is_made_again]
- A worker that keeps state is never stopped for its memory. [test_suspension: keeper_that_takes_much_memory]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import structlog

from services.actor.all_ranks import AllRanks
from services.actor.membership import ActorWorld
from services.actor.two_phase_resize import ResizeAborted, TwoPhaseResize
from tidegate.codec import decode_grants, decode_layout, encode_grants, encode_layout
from tidegate.events import EventBody
from tidegate.runtime.crew import Crew, WorkerGone
from tidegate.types import Grant, Layout, TransitionId
from tidegate.v1 import commands_pb2, events_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire


class NotSuspended(RuntimeError):
    """There is no state in host memory to continue from."""


class Reports(Protocol):
    """The lead's reports."""

    async def publish(self, body: EventBody, *, transition: str = "", grants: Sequence[Grant] = ()) -> None: ...

    async def fail(self, what: str, error: Exception, *, grants: Sequence[types_pb2.Grant] = ()) -> None: ...


class Suspension:
    """Suspends and resumes the ranks, and reports it; see the module."""

    def __init__(
        self, crew: Crew, world: ActorWorld, two_phase: TwoPhaseResize, ranks: AllRanks, reports: Reports
    ) -> None:
        self._crew = crew
        self._world = world
        self._two_phase = two_phase
        self._ranks = ranks
        self._reports = reports
        self._is_suspended = False
        self._needs_epoch = False
        """Whether some worker may have left the epoch."""
        self._log = structlog.get_logger("suspension")

    def note_start(self) -> None:
        """Note that the actor began anew: no worker keeps an earlier state."""
        self._is_suspended = False

    @property
    def is_resting(self) -> bool:
        """Whether the state is in host memory, and all workers are in one epoch."""
        return self._is_suspended and not self._needs_epoch

    async def suspend(self, request: commands_pb2.SuspendRequest) -> None:
        transition, grants = TransitionId(request.header.transition_id), decode_grants(request.grants)
        try:
            async with self._ranks.alone():
                released, held_bytes = await self._suspend(transition, grants)
        except ResizeAborted as aborted:
            await self._reports.publish(events_pb2.ResizeFailed(message=str(aborted)), transition=transition)
        except Exception as error:  # noqa: BLE001 - the edge: after any error the ranks hold no usable state
            await self._reports.fail(f"suspension {transition}", error)
        else:
            gone = events_pb2.GpusReleased(grants=encode_grants(released), held_bytes=held_bytes)
            await self._reports.publish(gone, transition=transition, grants=released)

    async def resume(self, request: commands_pb2.ResumeRequest) -> None:
        transition, members = TransitionId(request.header.transition_id), decode_grants(request.grants)
        layout = decode_layout(request.layout)
        try:
            async with self._ranks.alone():
                report, num_dead = await self._resume(transition, members, layout)
                self._ranks.switch(layout)
        except ResizeAborted as aborted:
            # It names the GPUs: the state is as it was, and the scheduler tries again.
            await self._reports.fail(f"resumption {transition}", aborted, grants=request.grants)
            return
        except Exception as error:  # noqa: BLE001 - the edge: after any other error there is no state to go on from
            await self._reports.fail(f"resumption {transition}", error)
            return
        acquired = events_pb2.GpusAcquired(grants=request.grants)
        await self._reports.publish(acquired, transition=transition, grants=members)
        committed = events_pb2.LayoutCommitted(
            layout=encode_layout(layout), grants=request.grants, reshard=report, num_dead=num_dead
        )
        await self._reports.publish(committed, transition=transition, grants=members)
        # A new standby joins the world of the next resize, so start it while no resize is at work.
        async with self._ranks.alone():
            await self._world.stand_by()

    async def _suspend(self, transition: TransitionId, grants: Sequence[Grant]) -> tuple[tuple[Grant, ...], int]:
        """Returns the grants of the free GPUs, and the bytes of device memory that their workers still use.

        Raises ResizeAborted. After any other exception the actor's state is lost."""
        name = self._two_phase.new_name(transition)
        await self._two_phase.planned(transition)
        await self._crew.forget_dead()
        self._refuse_others(grants)
        prepare = wire.WorkerCall(prepare_suspension=wire.PrepareSuspension(id=name))
        try:
            await self._crew.ask_all(dict.fromkeys(self._world.joined, prepare))
            await self._two_phase.planned(transition)
            await self._crew.forget_dead()
            self._refuse_others(grants)
        except Exception as error:
            self._log.warning("suspension aborted", transition=transition, error=str(error))
            await self._stay(name)
            raise ResizeAborted(f"{type(error).__name__}: {error}") from error
        commit = wire.WorkerCall(commit_suspension=wire.CommitSuspension(id=name))
        members, joined = self._crew.members, self._world.joined
        replies, failed = await self._two_phase.ask_each(joined, commit)
        await self._crew.forget_dead()
        if unable := [failed[grant] for grant in self._crew.members if grant in failed]:
            raise unable[0]
        await self._two_phase.stop([grant for grant in failed if grant in self._crew.standbys])
        self._is_suspended = True
        self._world.keep(self._crew.members)
        released = await self._two_phase.release(self._crew.members)
        answered = [grant for grant in joined if grant not in failed]
        done = [it.suspended for grant, it in zip(answered, replies, strict=True) if grant in members]
        self._log.info(
            "suspended",
            transition=transition,
            num_ranks=len(released),
            freed_bytes=sum(each.freed_bytes for each in done),
            held_bytes=sum(each.held_bytes for each in done),
            kept_bytes=sum(each.kept_bytes for each in done),
        )
        return released, sum(each.held_bytes for each in done)

    def _refuse_others(self, grants: Sequence[Grant]) -> None:
        """Raises ResizeAborted unless exactly these members live. Without some, it is planned again for the others."""
        if set(grants) != set(self._crew.members):
            alive = ", ".join(grant.gpu for grant in self._crew.members) or "none"
            raise ResizeAborted(f"it is for {', '.join(grant.gpu for grant in grants)}, and these ranks live: {alive}")

    async def _stay(self, name: str) -> None:
        """Have all stay as they were. Raises the error of a living member that gives no answer."""
        abort = wire.WorkerCall(abort_suspension=wire.AbortSuspension(id=name))
        members = self._crew.members
        _, failed = await self._two_phase.ask_each(self._world.joined, abort)
        self._two_phase.raise_unreachable(failed, among=members)
        await self._crew.forget_dead()
        if unable := [failed[grant] for grant in self._crew.members if grant in failed]:
            raise unable[0]
        if not self._crew.members:
            raise WorkerGone(f"{name}: all {len(members)} members died")

    async def _resume(
        self, transition: TransitionId, members: Sequence[Grant], layout: Layout
    ) -> tuple[types_pb2.ReshardReport, int]:
        """Returns the slowest member's report, and the number of ranks of the old layout that are dead.

        Raises ResizeAborted. After any other exception the actor's state is lost."""
        if not self._is_suspended:
            raise NotSuspended("this lead has suspended no actor: the state of the checkpoint is the one to go on from")
        name = self._two_phase.new_name(transition)
        await self._two_phase.planned(transition)
        await self._crew.forget_dead()
        num_alive = self._num_keepers()
        try:
            await self._world.start(members, transition=transition)
            if self._needs_epoch or not self._world.is_whole:
                await self._world.join()
            report = await self._two_phase.prepare(name, layout, members)
            await self._two_phase.planned(transition)
        except Exception as error:
            self._log.warning("resumption aborted", transition=transition, error=str(error))
            await self._lie_down(name)
            was_whole = num_alive == self._ranks.layout.num_ranks
            if not was_whole and self._num_keepers() == num_alive:
                # A rank is dead and no further death explains the failure: what it left does not suffice.
                raise
            raise ResizeAborted(f"{type(error).__name__}: {error}") from error
        is_epoch_whole = await self._two_phase.switch(name, members)
        self._is_suspended, self._needs_epoch = False, False
        self._world.keep(())
        left = [grant for grant in members if grant in self._crew.members]
        self._crew.arrange(left)
        self._log.info("resumed", transition=transition, num_ranks=len(members), seconds=sum(report.seconds.values()))
        if not is_epoch_whole and len(left) == len(members):
            await self._two_phase.enter_next(f"{transition}/on", layout)
        return report, self._ranks.layout.num_ranks - num_alive

    def _num_keepers(self) -> int:
        """The living workers that have a part of the state."""
        return sum(map(self._world.keeps, self._world.everyone))

    async def _lie_down(self, name: str) -> None:
        """Give up the new layout and its GPUs. The state stays in host memory."""
        abort = wire.WorkerCall(abort_reshard=wire.AbortReshard(id=name))
        await self._two_phase.ask_each(self._world.everyone, abort)
        # A start that failed on one node leaves the workers of another under grants that the crew has not noted.
        await self._crew.take_over()
        self._needs_epoch = True
        await self._two_phase.release(self._crew.members)
