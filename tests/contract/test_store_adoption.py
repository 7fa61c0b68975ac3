"""Every store is closed to a client that has not attached to this very server under its present term."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.contract.store_bench import (
    ACTOR,
    GPUS,
    JOB,
    LONG_MS,
    ONE,
    attached,
    opened,
    owned_by_actor,
    servers,
    start_of_actor,
    store,
    world,
)
from tests.contract.store_worlds import World
from tidegate.adapters import tables
from tidegate.adapters.cell_store import COUNTS_PER_TERM, CellStore
from tidegate.adapters.cells import Session
from tidegate.ownership.records import GpuRecord, GpuState, MoveState, Outcome, StoreNotAdopted, VersionConflict
from tidegate.ports.store import Identity, JobState, Store, StoreContents
from tidegate.types import CommandId, Layout, Role, Token

__all__ = ["servers", "store", "world"]

EMPTY = StoreContents((), ())


GUARDED_CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "gpus": lambda store: store.gpus(),
    "register": lambda store: store.register(GPUS),
    "mark_lost": lambda store: store.mark_lost(GPUS[0], Token(1, 0)),
    "reclaim": lambda store: store.reclaim(GPUS[0], Token(1, 0)),
    "transitions": lambda store: store.transitions(JOB),
    "current_transitions": lambda store: store.current_transitions(JOB),
    "ownership": lambda store: store.ownership(JOB),
    "forget_transitions": lambda store: store.forget_transitions(JOB, keep=1),
    "forget_commands": lambda store: store.forget_commands(JOB, keep=()),
    "plan": lambda store: store.plan(start_of_actor(GPUS[0])),
    "advance": lambda store: store.advance(
        start_of_actor(GPUS[0]), GPUS[0], from_state=MoveState.PLANNED, to_state=MoveState.ACQUIRING
    ),
    "commit": lambda store: store.commit(start_of_actor(GPUS[0]), Role.ACTOR, Layout()),
    "close": lambda store: store.close(start_of_actor(GPUS[0]), Outcome.ABORTED),
    "renew": lambda store: store.renew(JOB, ONE, ttl_ms=LONG_MS),
    "release": lambda store: store.release(JOB, ONE),
    "expired": lambda store: store.expired(JOB, longest_ms=LONG_MS),
    "now": lambda store: store.now_unix_ms(),
    "campaign": lambda store: store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS),
    "load": lambda store: store.load(JOB),
    "save": lambda store: store.save(JOB, b"state", expected_write=0, version=0),
    "recall": lambda store: store.recall(JOB, CommandId("c")),
    "remember": lambda store: store.remember(JOB, CommandId("c"), b"done"),
    "next_boot": lambda store: store.next_boot(JOB, ONE),
}


async def refused(clients: Mapping[str, CellStore]) -> set[str]:
    """The calls, each by its own client, that raised StoreNotAdopted."""
    names = set()
    for name, client in clients.items():
        with suppress(StoreNotAdopted):
            await GUARDED_CALLS[name](client)
            continue
        names.add(name)
    return names


class TestAdoption:
    async def test_every_call_is_refused_before_this_client_attached(self, world: World, store: CellStore) -> None:
        assert await refused(dict.fromkeys(GUARDED_CALLS, world.client())) == set(GUARDED_CALLS)

    async def test_every_call_is_refused_after_the_server_restarted(self, world: World, store: CellStore) -> None:
        clients = {name: await attached(world) for name in GUARDED_CALLS}
        await world.restart()
        assert await refused(clients) == set(GUARDED_CALLS)

    async def test_every_call_is_refused_after_another_client_adopted_the_server_under_a_new_term(
        self, world: World, store: CellStore
    ) -> None:
        clients = {name: await attached(world) for name in GUARDED_CALLS}
        await world.restart()
        await opened(world, term=2)
        assert await refused(clients) == set(GUARDED_CALLS)

    async def test_a_write_decided_before_a_restart_is_refused_by_itself(self, world: World, store: CellStore) -> None:
        found = await store.identity()
        before = Session(found.run_id, found.term)
        await world.restart()
        cells, cell = world.cells(), tables.boot_cell(JOB, ONE)
        with pytest.raises(StoreNotAdopted):
            await cells.swap(before, expected={cell: None}, writes={cell: b"1"})
        after = await opened(world, term=2)
        with pytest.raises(StoreNotAdopted):
            await cells.swap(before, expected={cell: None}, writes={cell: b"1"})
        assert await after.next_boot(JOB, ONE) == 2 * COUNTS_PER_TERM + 1
        await cells.aclose()

    async def test_a_restart_keeps_the_data_and_closes_the_store_until_it_is_adopted(
        self, world: World, store: CellStore
    ) -> None:
        await owned_by_actor(store, GPUS[0])
        await store.save(JOB, b"state", expected_write=0, version=0)
        want = await store.gpus()

        await world.restart()

        with pytest.raises(StoreNotAdopted):
            await store.gpus()
        with pytest.raises(StoreNotAdopted):
            await store.attach()
        after = await opened(world, term=2)
        assert await after.gpus() == want
        assert await after.load(JOB) == JobState(b"state", 1, 0)
        with pytest.raises(StoreNotAdopted):
            await store.gpus()
        await store.attach()
        assert await store.gpus() == want

    async def test_a_store_that_was_shut_is_closed_to_all_until_it_is_adopted(
        self, world: World, store: CellStore
    ) -> None:
        await owned_by_actor(store, GPUS[0])
        want, found = await store.gpus(), await store.identity()

        await store.shut(expected=found)

        assert not (await store.identity()).is_open
        with pytest.raises(StoreNotAdopted):
            await store.gpus()
        with pytest.raises(VersionConflict):
            await store.shut(expected=found)
        after = await opened(world, term=7)
        assert await after.gpus() == want

    async def test_boots_and_epochs_of_a_later_term_are_above_those_that_the_store_has_lost(self, world: World) -> None:
        before = await opened(world, term=1)
        boots = [await before.next_boot(JOB, ONE) for _ in range(3)]
        lead = await before.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)

        await world.lose_data()
        after = await opened(world, term=2)

        assert await after.next_boot(JOB, ONE) > boots[-1]
        follower = await after.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        assert follower.epoch > lead.epoch

    async def test_of_two_adopters_of_a_store_the_second_is_refused(self, world: World) -> None:
        one, two = world.client(), world.client()
        found = await one.identity()
        assert found == Identity(found.run_id, None, 0)
        await one.adopt(expected=found, term=5, rebuilt=EMPTY)
        with pytest.raises(VersionConflict):
            await two.adopt(expected=found, term=6, rebuilt=EMPTY)
        assert await two.attach() == Identity(found.run_id, found.run_id, 5)

    async def test_an_open_store_is_not_adopted_again(self, world: World, store: CellStore) -> None:
        with pytest.raises(VersionConflict):
            await store.adopt(expected=await store.identity(), term=9, rebuilt=EMPTY)

    async def test_the_term_of_a_store_does_not_fall(self, world: World) -> None:
        await opened(world, term=7)
        await world.restart()
        client = world.client()
        with pytest.raises(VersionConflict):
            await client.adopt(expected=await client.identity(), term=7, rebuilt=EMPTY)

    async def test_rebuilt_ownership_is_in_the_store_once_it_is_open(self, world: World, store: CellStore) -> None:
        transition = await store.plan(start_of_actor(GPUS[0]))
        await world.restart()
        lost = GpuRecord(GPUS[0], GpuState.LOST, ACTOR, Token(1, 4))
        aborted = replace(transition, outcome=Outcome.ABORTED)
        client = world.client()
        assert (await client.contents()).transitions == (transition,)
        await client.adopt(expected=await client.identity(), term=2, rebuilt=StoreContents((lost,), (aborted,)))
        await client.attach()
        assert (await client.gpus())[GPUS[0]] == lost
        assert await client.transitions(JOB) == (aborted,)
        assert (await client.contents()).transitions == ()
