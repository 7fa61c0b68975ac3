"""The scheduler's side of suspending the actor and of resuming it, over the store in memory."""

from __future__ import annotations

from collections.abc import Sequence

from tests.component_bench import JOB
from tests.unit.actor.actor_bench import FIRST, SECOND
from tests.unit.actor.resize_bench import ACTOR, DEADLINE_MS, ResizeBench
from tidegate.codec import decode_grants, encode_grants, encode_layout
from tidegate.ownership.records import Move, MoveState, Part, PartKind, Transition
from tidegate.ownership.transitions import earned_outcome
from tidegate.types import GpuId, Grant, Layout, Role, TransitionId
from tidegate.v1 import commands_pb2, events_pb2

HOME = (FIRST, SECOND)


class SuspendBench(ResizeBench):
    """The scheduler's side of suspending the actor."""

    async def ask_suspension(self) -> TransitionId:
        name = await self._planned(
            [Move(grant.gpu, ACTOR, None, grant.token) for grant in self.grants], PartKind.SUSPEND, None
        )
        request = commands_pb2.SuspendRequest(
            header=self.of.bench.header(transition=name), grants=encode_grants(self.grants)
        )
        self.of.take(request)
        return name

    async def suspended(self, *, nth: int = 1) -> events_pb2.GpusReleased:
        """Suspend, and free what is released, as the scheduler does."""
        name = await self.ask_suspension()
        released = (await self.of.bench.published("gpus_released", count=nth))[-1].gpus_released
        await self.free(name, released)
        return released

    async def free(self, name: TransitionId, released: events_pb2.GpusReleased) -> None:
        transition = await self.stored(name)
        for grant in decode_grants(released.grants):
            transition = await self.store.advance(
                transition, grant.gpu, from_state=MoveState.DRAINING, to_state=MoveState.RELEASED
            )
        transition = await self.store.commit(transition, Role.ACTOR, None)
        await self.store.close(transition, earned_outcome(transition))
        self.grants = ()

    async def ask_resumption(self, gpus: Sequence[str], layout: Layout) -> TransitionId:
        records = await self.store.gpus()
        moves = [Move(GpuId(gpu), None, ACTOR, records[GpuId(gpu)].token) for gpu in gpus]
        name = await self._planned(moves, PartKind.RESUME, layout)
        transition = await self.stored(name)
        self.members_after = tuple(Grant(move.gpu, move.token) for move in transition.moves)
        self.of.take(
            commands_pb2.ResumeRequest(
                header=self.of.bench.header(transition=name),
                grants=encode_grants(self.members_after),
                layout=encode_layout(layout),
            )
        )
        return name

    async def _planned(self, moves: list[Move], kind: PartKind, layout: Layout | None) -> TransitionId:
        self._num_transitions += 1
        name = TransitionId(f"{JOB}/1/t{self._num_transitions}")
        old = self.layout if kind is PartKind.SUSPEND else None
        part = Part(Role.ACTOR, kind, old, layout)
        transition = await self.store.plan(
            Transition(name, JOB, 1, tuple(moves), (part,), 0, DEADLINE_MS, "the test asks")
        )
        for move in moves:
            state = MoveState.DRAINING if move.source else MoveState.ACQUIRING
            transition = await self.store.advance(transition, move.gpu, from_state=MoveState.PLANNED, to_state=state)
        return name

    async def component_failed(self) -> events_pb2.Failed:
        """The lead's report that the component failed."""
        return (await self.of.bench.published("failed"))[-1].failed
