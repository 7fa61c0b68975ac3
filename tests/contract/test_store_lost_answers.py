"""In every store a write whose answer was lost counts once."""

from __future__ import annotations

from tests.contract.store_bench import GPUS, JOB, LONG_MS, ONE, acquire, in_force, servers, start_of_actor, store, world
from tests.contract.store_worlds import World
from tidegate.adapters.cell_store import CellStore
from tidegate.ownership.records import Outcome
from tidegate.ports.store import JobState
from tidegate.types import CommandId, Role, Token

__all__ = ["servers", "store", "world"]


class TestLostAnswers:
    """The store's client repeats a write that took effect and whose answer was lost. The write counts once."""

    async def test_a_plan_whose_answer_is_lost_counts_once(self, world: World, store: CellStore) -> None:
        world.lose_next_answer()
        planned = await store.plan(start_of_actor(GPUS[0]))
        assert await store.transitions(JOB) == (planned,)

    async def test_a_grant_whose_answer_is_lost_counts_once(self, world: World, store: CellStore) -> None:
        planned = await store.plan(start_of_actor(GPUS[0]))
        world.lose_next_answer()
        assert (await acquire(store, planned)).move(GPUS[0]).granted_token == Token(1, 1)

    async def test_a_close_whose_answer_is_lost_counts_once(self, world: World, store: CellStore) -> None:
        planned = await store.plan(start_of_actor(GPUS[0]))
        world.lose_next_answer()
        assert (await store.close(planned, Outcome.ABORTED)).outcome is Outcome.ABORTED

    async def test_a_saved_state_whose_answer_is_lost_counts_once(self, world: World, store: CellStore) -> None:
        world.lose_next_answer()
        assert await store.save(JOB, b"one", expected_write=0, version=1) == JobState(b"one", 1, 1)
        assert await store.load(JOB) == JobState(b"one", 1, 1)
        world.lose_next_answer()
        assert await store.save(JOB, b"two", expected_write=1, version=1) == JobState(b"two", 2, 1)
        assert await store.load(JOB) == JobState(b"two", 2, 1)

    async def test_a_command_result_whose_answer_is_lost_counts_once(self, world: World, store: CellStore) -> None:
        world.lose_next_answer()
        assert await store.remember(JOB, CommandId("c"), b"done") == b"done"

    async def test_a_campaign_whose_answer_is_lost_leaves_one_lead(self, world: World, store: CellStore) -> None:
        world.lose_next_answer()
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        assert await in_force(store) == lead
