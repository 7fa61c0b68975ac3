"""A scheduler that starts while its store does not answer."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from services.scheduler.shell.opening import open_store
from tidegate.adapters.cell_store import RETRY_DELAYS_S, CellStore
from tidegate.adapters.memory_bus import MemoryTermRegister
from tidegate.adapters.memory_store import MemoryCells, MemoryServer
from tidegate.ownership.adoption import GateReports
from tidegate.ownership.records import StoreUnavailable
from tidegate.ports.store import Identity
from tidegate.types import InstanceId

NAME = InstanceId("scheduler")
CALLS = len(RETRY_DELAYS_S) + 1
"""The calls of the server that one call of the store makes before it fails."""


class _Silent(MemoryCells):
    """Gives no answer to the first calls."""

    def __init__(self, server: MemoryServer, num_silent: int) -> None:
        super().__init__(server)
        self.num_silent = num_silent

    async def identity(self) -> Identity:
        if self.num_silent:
            self.num_silent -= 1
            raise StoreUnavailable("the store did not answer")
        return await super().identity()


async def no_gates() -> GateReports:
    return {}


async def test_a_store_without_an_answer_ends_no_start() -> None:
    server = MemoryServer()
    store = CellStore(_Silent(server, CALLS))
    with capture_logs() as lines:
        assert await open_store(store, MemoryTermRegister(), no_gates, name=NAME) == 1
    assert server.identity.is_open
    (line,) = lines
    assert (line["log_level"], line["error"]) == ("warning", "the store did not answer")
    assert 0 < line["left_s"] <= 5


async def test_a_lost_answer_to_the_number_of_the_start_costs_a_number_alone() -> None:
    server = MemoryServer()
    store = CellStore(MemoryCells(server))
    await open_store(store, MemoryTermRegister(), no_gates, name=NAME)
    server.num_answers_to_lose = CALLS
    assert await open_store(store, MemoryTermRegister(), no_gates, name=NAME) > 1
    assert server.num_answers_to_lose == 0


async def test_a_store_that_never_answers_is_given_up_by_a_start_that_says_why_and_fails() -> None:
    store = CellStore(_Silent(MemoryServer(), 10**6))
    with capture_logs() as lines, pytest.raises(StoreUnavailable, match="did not answer"):
        await open_store(store, MemoryTermRegister(), no_gates, name=NAME, limit_s=0.5)
    last = lines[-1]
    assert (last["log_level"], last["event"]) == ("error", "cannot start without the store")
    assert last["error"] == "the store did not answer"
