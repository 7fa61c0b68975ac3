"""The scheduler's time follows the store's clock, and leaves out the jumps of a clock that was set."""

from __future__ import annotations

import pytest

from services.scheduler.shell.store_clock import JUMP_MS, StoreClock
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.memory_store import MemoryCells, MemoryServer

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
