"""The scheduler's time follows the store's clock, and leaves out the jumps of a clock that was set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.decide.expectations import last_noted_ms
from services.scheduler.shell.store_clock import JUMP_MS, StoreClock
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import Absence
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB, gpu, spec
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.types import Token

START_MS = 1_000_000


class Machine:
    """A store's clock and this machine's monotonic one."""

    def __init__(self) -> None:
        self.server = MemoryServer(now_unix_ms=START_MS)
        self.store = CellStore(MemoryCells(self.server))
        self.monotonic_s = 50.0
        self.clock = StoreClock(self.store, monotonic_s=lambda: self.monotonic_s)

    @classmethod
    async def started(cls) -> Machine:
        machine = cls()
        store = machine.store
        await store.adopt(expected=await store.identity(), term=1, rebuilt=await store.contents())
        await store.attach()
        return machine

    def pass_ms(self, duration_ms: int) -> None:
        self.monotonic_s += duration_ms / 1000
        self.server.pass_ms(duration_ms)


async def test_the_time_is_the_stores_and_goes_on_by_this_machines_between_two_reads() -> None:
    machine = await Machine.started()
    assert await machine.clock.now_ms() == START_MS
    machine.pass_ms(60_000)
    assert await machine.clock.now_ms() == START_MS + 60_000
    machine.server.pass_ms(JUMP_MS - 1)
    assert await machine.clock.read_ms() == START_MS + 60_000 + JUMP_MS - 1


@pytest.mark.parametrize("jump_ms", [3_600_000, -900_000])
async def test_a_jump_is_left_out_from_then_on(jump_ms: int) -> None:
    machine = await Machine.started()
    await machine.clock.read_ms()
    machine.server.pass_ms(jump_ms)
    machine.pass_ms(10)
    assert await machine.clock.read_ms() == START_MS + 10
    machine.pass_ms(20)
    assert await machine.clock.read_ms() == START_MS + 30
    machine.server.pass_ms(-jump_ms)
    assert await machine.clock.read_ms() == START_MS + 30


@pytest.mark.parametrize("noted_ms", [START_MS + 3_600_000, START_MS - 3_600_000, START_MS + JUMP_MS])
async def test_a_scheduler_that_starts_after_the_clock_went_back_goes_on_from_the_latest_time_in_the_state(
    noted_ms: int,
) -> None:
    machine = await Machine.started()
    machine.clock.goes_on_from(noted_ms)
    begin_ms = noted_ms if noted_ms > START_MS + JUMP_MS else START_MS
    assert await machine.clock.now_ms() == begin_ms
    machine.pass_ms(30)
    assert await machine.clock.read_ms() == begin_ms + 30


def test_the_latest_time_in_a_state_is_that_of_its_last_command_or_absence() -> None:
    assert last_noted_ms(ClusterState(job=JOB)) == 0
    waiting = booted(FakeCluster(spec())).run_until(lambda state: bool(state.expectations))
    issued_ms = max(each.issued_ms for each in waiting.expectations.values())
    assert last_noted_ms(waiting) == issued_ms
    absent = {gpu("n1", 1): Absence(Token(1, 5), issued_ms + 7), gpu("n1", 2): Absence(Token(1, 5), None)}
    assert last_noted_ms(replace(waiting, absent=absent)) == issued_ms + 7
