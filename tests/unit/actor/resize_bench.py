"""The bench of changes of the actor's GPUs: a training whose GPUs are in the store, and the scheduler's side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.component_bench import JOB
from tests.unit.actor.actor_bench import FIRST, SECOND, Training, training
from tests.unit.actor.fake_ranks import PLENTY
from tidegate.adapters.cell_store import CellStore
from tidegate.codec import encode_grants, encode_layout
from tidegate.ownership.records import GpuState, Move, MoveState, Outcome, Owner, Part, PartKind, Transition
from tidegate.ownership.transitions import earned_outcome
from tidegate.types import GpuId, Grant, Layout, Role, TransitionId, node_of
from tidegate.v1 import commands_pb2, events_pb2

SPARE = GpuId("n1/0")
ACTOR = Owner(JOB, Role.ACTOR)
DEADLINE_MS = 1 << 60


class ResizeBench:
    """A training whose GPUs are in the store, and the scheduler's side of moving them."""

    def __init__(self, of: Training) -> None:
        self.of = of
        self.grants: tuple[Grant, ...] = ()
        self.members_after: tuple[Grant, ...] = ()
        self.layout: Layout | None = None
        self._num_transitions = 0

    @property
    def store(self) -> CellStore:
        return self.of.bench.store

    async def plan(self, gpus: Sequence[str], layout: Layout) -> tuple[TransitionId, tuple[Grant, ...]]:
        """Plan a transition, up to acquiring or draining. Returns its id and the grants after it, in rank order."""
        self._num_transitions += 1
        name = TransitionId(f"{JOB}/1/t{self._num_transitions}")
        have = {grant.gpu: grant for grant in self.grants}
        records = await self.store.gpus()
        moves = [Move(gpu, ACTOR, None, grant.token) for gpu, grant in have.items() if gpu not in gpus]
        moves += [Move(GpuId(gpu), None, ACTOR, records[GpuId(gpu)].token) for gpu in gpus if gpu not in have]
        kind = PartKind.RESIZE if self.layout else PartKind.START
        part = Part(Role.ACTOR, kind, self.layout, layout)
        transition = await self.store.plan(
            Transition(name, JOB, 1, tuple(moves), (part,), 0, DEADLINE_MS, "the test asks")
        )
        for move in moves:
            state = MoveState.DRAINING if move.source else MoveState.ACQUIRING
            transition = await self.store.advance(transition, move.gpu, from_state=MoveState.PLANNED, to_state=state)
        come = {move.gpu: Grant(move.gpu, move.token) for move in transition.moves if move.target}
        return name, tuple((have | come)[GpuId(gpu)] for gpu in gpus)

    async def start(self) -> None:
        """Start the actor on the first two slots."""
        await self.store.register((GpuId(FIRST), GpuId(SECOND), SPARE))
        name, self.grants = await self.plan([FIRST, SECOND], Layout(dp=2))
        await self.commit_start(name)
        self.of.take(self.of.bench.scale_up(self.grants))
        await self.of.bench.published("layout_committed")

    async def commit_start(self, name: TransitionId) -> None:
        transition = await self.store.commit(await self.stored(name), Role.ACTOR, Layout(dp=2))
        await self.store.close(transition, Outcome.COMMITTED)
        self.layout = Layout(dp=2)

    async def stored(self, name: str) -> Transition:
        (found,) = [each for each in await self.store.transitions(JOB) if each.id == name]
        return found

    async def close(self, name: str) -> None:
        """Close the transition, as the scheduler does past the deadline."""
        transition = await self.stored(name)
        await self.store.close(transition, earned_outcome(transition))

    async def ask(self, gpus: Sequence[str], layout: Layout) -> TransitionId:
        name, members = await self.plan(gpus, layout)
        self.send(name, members, layout)
        return name

    def send(self, name: TransitionId, members: tuple[Grant, ...], layout: Layout) -> None:
        coming = [grant for grant in members if grant not in self.grants]
        leaving = [grant for grant in self.grants if grant not in members]
        header = self.of.bench.header(transition=name)
        fields: dict[str, Any] = {"members": encode_grants(members), "layout": encode_layout(layout)}
        command: Any
        if coming and not leaving:
            command = commands_pb2.ScaleUpRequest(header=header, grants=encode_grants(coming), **fields)
        elif leaving and not coming:
            command = commands_pb2.ScaleDownRequest(header=header, grants=encode_grants(leaving), **fields)
        else:
            command = commands_pb2.MigrateRequest(header=header, to=encode_grants(coming), **fields)
            getattr(command, "from").extend(encode_grants(leaving))
        self.of.take(command)
        self.members_after = members

    async def replace_dead(self, gpu: str) -> TransitionId:
        """Replace a dead rank, as the scheduler does once the gate reports its GPU as free."""
        gpus = [grant.gpu for grant in self.grants]
        await self.lose(gpu)
        assert self.layout is not None, "it was started"
        return await self.ask(gpus, self.layout)

    async def lose(self, *gpus: str) -> None:
        """Free these GPUs after a loss."""
        for record in [record for gpu, record in (await self.store.gpus()).items() if gpu in gpus]:
            if record.state is not GpuState.LOST:
                await self.store.mark_lost(record.gpu, record.token)
            await self.store.reclaim(record.gpu, record.token)
        self.grants = tuple(grant for grant in self.grants if grant.gpu not in gpus)

    async def dies(self, gpu: str, kind: str) -> None:
        """Kill the rank in a call of this kind, when the other ranks have done it or wait in it."""
        rank = self.of.ranks.of[gpu]
        await self.of.bench.changes.until(lambda: rank.is_staying)
        self.of.bench.instances[node_of(GpuId(gpu))].kill(gpu)

    async def committed(self, nth: int = 2) -> events_pb2.Event:
        """The nth committed layout. The first is that of the start."""
        return (await self.of.bench.published("layout_committed", count=nth))[-1]

    async def failed(self) -> events_pb2.Event:
        return (await self.of.bench.published("resize_failed"))[0]


@asynccontextmanager
async def resized(
    tmp_path: Path, *, num_permits: int = PLENTY, standby: str = "4", **actor: Any
) -> AsyncIterator[ResizeBench]:
    async with training(tmp_path, num_permits=num_permits, actor={"standby": standby, **actor}) as of:
        yield ResizeBench(of)


async def until_asked(at: ResizeBench, count: int) -> None:
    ranks = at.of.ranks.of
    await at.of.bench.changes.until(lambda: [ranks[gpu].num_asked for gpu in (FIRST, SECOND)] == [count, count])


def permit(at: ResizeBench, count: int) -> None:
    for permits in at.of.ranks.permits.values():
        for _ in range(count):
            permits.release()
