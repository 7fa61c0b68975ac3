"""Which workers stand by, in what order they start, and within which memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.component_bench import JOB, NODES, PATIENCE_S, Changes, FakeInstance, job_config, replied
from tidegate.runtime.crew import Crew, WorkerRefused
from tidegate.runtime.standbys import StandbyRules, Standbys
from tidegate.types import NO_TOKEN, GpuId, Grant, JobId, Role, Token
from tidegate.v1 import commands_pb2
from tidegate.v1 import workers_pb2 as wire

A, B, C = (GpuId(f"n0/{number}") for number in range(3))
BUDGET_BYTES = 1000


def at_work(*gpus: GpuId) -> list[Grant]:
    return [Grant(gpu, Token(1, 1)) for gpu in gpus]


def standing_by(*gpus: GpuId) -> list[Grant]:
    return [Grant(gpu, NO_TOKEN) for gpu in gpus]


class Idle:
    """A worker that does nothing."""

    async def handle(self, call: wire.WorkerCall) -> AsyncGenerator[wire.WorkerReply, None]:
        yield replied(call)


class Bench:
    """Standbys on A and B of one node. A worker rests once `may_rest` is set; `memory_bytes` says what it then uses,
    and `refuses` which workers do not."""

    def __init__(self, tmp_path: Path, *, slots: Sequence[GpuId] = (A, B)) -> None:
        self.instance: FakeInstance[Idle] = FakeInstance(NODES[0], job_config(tmp_path), lambda _: Idle())
        self.crew = Crew(JOB, lambda *_: self.instance, call_timeout_s=PATIENCE_S, work_timeout_s=PATIENCE_S)
        self.crew.note_addresses([commands_pb2.InstanceAddress(instance="inference@n0", endpoint="at-n0", boot=1)])
        self.changes = Changes()
        self.may_rest = asyncio.Event()
        self.may_rest.set()
        self.memory_bytes: dict[str, int] = {}
        self.refuses: set[str] = set()
        self.resting: list[str] = []
        self.rested: list[str] = []
        rules = StandbyRules(Role.INFERENCE, slots=slots, budget_bytes=BUDGET_BYTES)
        self.standbys = Standbys(self.crew, rules, self._rest)

    async def _rest(self, grant: Grant) -> wire.Started:
        self.resting.append(grant.gpu)
        self.changes.notify()
        await self.may_rest.wait()
        if grant.gpu in self.refuses:
            raise WorkerRefused("it is busy")
        self.rested.append(grant.gpu)
        return wire.Started(memory_bytes=self.memory_bytes.get(grant.gpu, 1), held_bytes=5)

    async def alive(self) -> list[Grant]:
        return sorted(await self.instance.workers(JobId(JOB)))


@asynccontextmanager
async def bench(tmp_path: Path, *, slots: Sequence[GpuId] = (A, B)) -> AsyncIterator[Bench]:
    of = Bench(tmp_path, slots=slots)
    try:
        yield of
    finally:
        await of.standbys.aclose()


async def test_one_standby_starts_at_a_time(tmp_path: Path) -> None:
    async with bench(tmp_path) as of:
        of.may_rest.clear()
        of.standbys.fill(taken=())
        await of.changes.until(lambda: of.resting == [A])
        assert of.instance.started == standing_by(A)
        of.may_rest.set()
        await of.changes.until(lambda: of.resting == [A, B])
        assert await of.alive() == standing_by(A, B)


async def test_a_slot_that_is_taken_or_has_a_standby_gets_no_other(tmp_path: Path) -> None:
    async with bench(tmp_path) as of:
        of.standbys.fill(taken={A})
        await of.changes.until(lambda: of.resting == [B])
        await of.standbys.until_none_starts(standing_by(B))
        of.standbys.fill(taken={A})
        of.standbys.fill(taken=())
        await of.changes.until(lambda: of.resting == [B, A])
        await of.standbys.until_none_starts(standing_by(A))
        assert of.instance.started == standing_by(B, A)


async def test_a_start_waits_for_the_standby_that_is_being_built_and_ends_one_that_is_not_begun(tmp_path: Path) -> None:
    async with bench(tmp_path) as of:
        of.may_rest.clear()
        of.standbys.fill(taken=())
        await of.changes.until(lambda: of.resting == [A])
        await of.standbys.until_none_starts(at_work(B))

        async def start() -> list[str]:
            await of.standbys.until_none_starts(at_work(A))
            return list(of.rested)

        starting = asyncio.create_task(start())
        of.may_rest.set()
        assert await starting == [A], "what was built when the start went on"
        assert of.resting == [A]
        assert await of.alive() == standing_by(A)


async def test_members_stand_down_with_the_bytes_that_they_still_use(tmp_path: Path) -> None:
    async with bench(tmp_path) as of:
        await of.crew.start(at_work(A, B), transition="start")
        assert await of.standbys.stand_down(at_work(A, B)) == 10
        assert (await of.alive(), list(of.crew.standbys)) == (standing_by(A, B), standing_by(A, B))
        of.standbys.fill(taken=())
        await of.crew.start(at_work(A), transition="start")
        of.standbys.note_taken(at_work(A))
        assert of.resting == [A, B], "nothing is built again"


async def test_of_workers_one_of_which_does_not_rest_none_stands_down(tmp_path: Path) -> None:
    async with bench(tmp_path) as of:
        await of.crew.start(at_work(A, B), transition="start")
        of.refuses.add(B)
        assert await of.standbys.stand_down(at_work(A, B)) is None
        assert await of.alive() == at_work(A, B)


async def test_of_workers_one_of_which_takes_too_much_memory_none_stands_down_and_its_slot_stays_empty(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as of:
        await of.crew.start(at_work(A, B), transition="start")
        of.memory_bytes[B] = BUDGET_BYTES + 1
        assert await of.standbys.stand_down(at_work(A, B)) is None
        await of.crew.stop(at_work(A, B), transition="shrink")
        of.standbys.fill(taken=())
        await of.changes.until(lambda: of.resting == [A, B, A])
        await of.standbys.until_none_starts(standing_by(A))
        assert await of.alive() == standing_by(A)


async def test_a_standby_that_died_is_replaced(tmp_path: Path) -> None:
    async with bench(tmp_path) as of:
        of.standbys.fill(taken={B})
        await of.changes.until(lambda: of.resting == [A])
        await of.standbys.until_none_starts(standing_by(A))
        of.instance.kill(A)
        await of.crew.forget_dead()
        of.standbys.fill(taken={B})
        await of.changes.until(lambda: of.resting == [A, A])
        assert await of.alive() == standing_by(A)


async def test_a_worker_stands_down_only_on_a_slot_where_the_component_may_come_back(tmp_path: Path) -> None:
    async with bench(tmp_path) as of:
        await of.crew.start(at_work(C), transition="start")
        assert await of.standbys.stand_down(at_work(C)) is None
        assert of.resting == []
