"""A scheduler that starts while its store does not answer."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from structlog.testing import capture_logs

from services.scheduler.shell.opening import LIMIT_S, RETRY_S, open_store
from tests.component_bench import ManualClock
from tidegate.adapters.cell_store import COUNTS_PER_TERM, CellStore
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.ownership.adoption import GateReports, adopt
from tidegate.ownership.records import StoreUnavailable
from tidegate.ports.store import Identity
from tidegate.types import InstanceId, JobId

NAME = InstanceId("scheduler")


class _Silent(CellStore):
    """Gives up its first calls, and loses so many answers to the number of a start."""

    def __init__(self, server: MemoryServer, *, num_silent: int = 0, num_lost: int = 0) -> None:
        super().__init__(MemoryCells(server))
        self.num_silent = num_silent
        self.num_lost = num_lost

    async def identity(self) -> Identity:
        if self.num_silent:
            self.num_silent -= 1
            raise StoreUnavailable("the store did not answer")
        return await super().identity()

    async def next_boot(self, job: JobId, name: InstanceId) -> int:
        boot = await super().next_boot(job, name)
        if self.num_lost:
            self.num_lost -= 1
            raise StoreUnavailable("the store did not answer")
        return boot


async def no_gates() -> GateReports:
    return {}


async def opened(store: CellStore, *pauses_s: float) -> int:
    """The number of the start. It sleeps once for each of the pauses, which then pass."""
    clock = ManualClock()
    opening = asyncio.create_task(
        open_store(
            store,
            partial(adopt, store, MemoryTermRegister()),
            no_gates,
            job=JobId("job"),
            name=NAME,
            now=clock.now,
            sleep=clock.sleep,
        )
    )
    for pause_s in pauses_s:
        await clock.advance(pause_s)
    return await opening


async def test_a_store_without_an_answer_ends_no_start() -> None:
    server = MemoryServer()
    with capture_logs() as lines:
        assert await opened(_Silent(server, num_silent=1), RETRY_S) == COUNTS_PER_TERM + 1
    assert server.identity.is_open
    (line,) = lines
    assert (line["log_level"], line["error"]) == ("warning", "the store did not answer")
    assert line["left_s"] == LIMIT_S


async def test_a_lost_answer_to_the_number_of_the_start_costs_a_number_alone() -> None:
    store = _Silent(MemoryServer(), num_lost=1)
    assert await opened(store, RETRY_S) == COUNTS_PER_TERM + 2


async def test_a_store_that_never_answers_is_given_up_by_a_start_that_says_why_and_fails() -> None:
    store = _Silent(MemoryServer(), num_silent=10**6)
    with capture_logs() as lines, pytest.raises(StoreUnavailable, match="did not answer"):
        await opened(store, LIMIT_S)
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "store not open yet: asking again"),
        ("error", "cannot start without the store"),
    ]
    assert lines[-1]["error"] == "the store did not answer"
