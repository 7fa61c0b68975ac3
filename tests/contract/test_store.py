"""Every store keeps the promises of `tidegate.ports.store`: the one in memory and the one on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.contract.store_worlds import MemoryWorld, RedisWorld, World
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Cell, Session
from tidegate.ownership.records import (
    GpuBusy,
    GpuRecord,
    GpuState,
    IllegalStep,
    Move,
    MoveState,
    Outcome,
    Owner,
    Part,
    PartKind,
    PartState,
    StaleToken,
    StoreNotAdopted,
    Transition,
    UnknownGpu,
    UnknownTransition,
    VersionConflict,
)
from tidegate.ports.store import Identity, JobState, LeadRecord, Store, StoreContents
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.types import CommandId, GpuId, InstanceId, JobId, Layout, Role, Token, TransitionId

JOB = JobId("job")
ACTOR, ROLLOUT = Owner(JOB, Role.ACTOR), Owner(JOB, Role.ROLLOUT)
GPUS = tuple(GpuId(f"node-a/{index}") for index in range(4))
ONE, TWO = InstanceId("actor@node-a"), InstanceId("actor@node-b")
PROBE = InstanceId("actor@node-p")
UNUSED = Token(1, 0)
"""The token of a GPU before its first grant, when it was registered in term 1."""
LONG_MS = 60_000
EMPTY = StoreContents((), ())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedServers]:
    async with EmbeddedServers(tmp_path_factory.mktemp("store")) as embedded:
        yield embedded


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, servers: EmbeddedServers) -> AsyncIterator[World]:
    async def restart() -> None:
        await servers.store.stop()
        await servers.start()

    world: World
    if request.param == "memory":
        world = MemoryWorld()
    else:
        world = RedisWorld(servers.store, restart)
        await world.open()
    yield world
    await world.aclose()
    assert world.num_answers_to_lose == 0, "the test meant to lose an answer and did not"


@pytest.fixture
async def store(world: World) -> CellStore:
    """A store that is open under term 1, with `GPUS` registered."""
    client = await opened(world, term=1)
    await client.register(GPUS)
    return client


async def opened(world: World, *, term: int) -> CellStore:
    client = world.client()
    await client.adopt(expected=await client.identity(), term=term, rebuilt=await client.contents())
    await client.attach()
    return client


async def attached(world: World) -> CellStore:
    client = world.client()
    await client.attach()
    return client


def start_of_actor(*gpus: GpuId, name: str = "start", tokens: Token = UNUSED) -> Transition:
    return Transition(
        id=TransitionId(name),
        job=JOB,
        incarnation=1,
        moves=tuple(Move(gpu, None, ACTOR, tokens) for gpu in gpus),
        parts=(Part(Role.ACTOR, PartKind.START, None, Layout(dp=len(gpus))),),
        planned_version=0,
        deadline_unix_ms=2_000_000,
        reason="the job starts",
    )


def handover(gpu: GpuId, token: Token, *, name: str = "handover") -> Transition:
    return replace(
        start_of_actor(gpu, name=name),
        moves=(Move(gpu, ACTOR, ROLLOUT, token),),
        parts=(
            Part(Role.ACTOR, PartKind.SUSPEND, Layout(), None),
            Part(Role.ROLLOUT, PartKind.START, None, Layout()),
        ),
    )


def stop_of_actor(gpu: GpuId, token: Token) -> Transition:
    return replace(
        start_of_actor(gpu, name="stop"),
        moves=(Move(gpu, ACTOR, None, token),),
        parts=(Part(Role.ACTOR, PartKind.STOP, Layout(), None),),
    )


async def acquire(store: Store, transition: Transition) -> Transition:
    for move in transition.moves:
        transition = await store.advance(
            transition, move.gpu, from_state=MoveState.PLANNED, to_state=MoveState.ACQUIRING
        )
    return transition


async def owned_by_actor(store: Store, *gpus: GpuId) -> None:
    started = await acquire(store, await store.plan(start_of_actor(*gpus)))
    await store.commit(started, Role.ACTOR, Layout(dp=len(gpus)))
    await store.close(started, Outcome.COMMITTED)


async def release(store: Store, transition: Transition, gpu: GpuId) -> Transition:
    await store.advance(transition, gpu, from_state=MoveState.PLANNED, to_state=MoveState.DRAINING)
    return await store.advance(transition, gpu, from_state=MoveState.DRAINING, to_state=MoveState.RELEASED)


GUARDED_CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "gpus": lambda store: store.gpus(),
    "register": lambda store: store.register(GPUS),
    "mark_lost": lambda store: store.mark_lost(GPUS[0], Token(1, 0)),
    "reclaim": lambda store: store.reclaim(GPUS[0], Token(1, 0)),
    "transitions": lambda store: store.transitions(JOB),
    "current_transitions": lambda store: store.current_transitions(JOB),
    "ownership": lambda store: store.ownership(JOB),
    "forget_transitions": lambda store: store.forget_transitions(JOB, keep=1),
    "plan": lambda store: store.plan(start_of_actor(GPUS[0])),
    "advance": lambda store: store.advance(
        start_of_actor(GPUS[0]), GPUS[0], from_state=MoveState.PLANNED, to_state=MoveState.ACQUIRING
    ),
    "commit": lambda store: store.commit(start_of_actor(GPUS[0]), Role.ACTOR, Layout()),
    "close": lambda store: store.close(start_of_actor(GPUS[0]), Outcome.ABORTED),
    "renew": lambda store: store.renew(ONE, ttl_ms=LONG_MS),
    "release": lambda store: store.release(ONE),
    "expired": lambda store: store.expired(),
    "now": lambda store: store.now_unix_ms(),
    "campaign": lambda store: store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS),
    "load": lambda store: store.load(JOB),
    "save": lambda store: store.save(JOB, b"state", expected_write=0, version=0),
    "recall": lambda store: store.recall(JOB, CommandId("c")),
    "remember": lambda store: store.remember(JOB, CommandId("c"), b"done"),
    "next_boot": lambda store: store.next_boot(ONE),
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
        cells, cell = world.cells(), Cell("boots", ONE)
        with pytest.raises(StoreNotAdopted):
            await cells.swap(before, expected={cell: None}, writes={cell: b"1"})
        after = await opened(world, term=2)
        with pytest.raises(StoreNotAdopted):
            await cells.swap(before, expected={cell: None}, writes={cell: b"1"})
        assert await after.next_boot(ONE) == 1
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


class TestOwnership:
    async def test_registering_adds_free_gpus_and_leaves_the_others_alone(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        want = await store.gpus()
        await store.register((*GPUS, GpuId("node-b/0")))
        new = GpuRecord(GpuId("node-b/0"), GpuState.FREE, None, Token(1, 0))
        assert await store.gpus() == {**want, new.gpu: new}

    async def test_a_gpu_goes_from_the_pool_to_an_owner_to_another_and_back_under_growing_tokens(
        self, store: CellStore
    ) -> None:
        gpu = GPUS[0]
        await owned_by_actor(store, gpu)
        assert (await store.gpus())[gpu] == GpuRecord(gpu, GpuState.OWNED, ACTOR, Token(1, 1))

        moving = await store.plan(handover(gpu, Token(1, 1)))
        await release(store, moving, gpu)
        assert (await store.gpus())[gpu] == GpuRecord(gpu, GpuState.FREE, None, Token(1, 1), moving.id)
        moving = await store.advance(moving, gpu, from_state=MoveState.RELEASED, to_state=MoveState.ACQUIRING)
        assert moving.move(gpu).granted_token == Token(1, 2)
        assert (await store.gpus())[gpu] == GpuRecord(gpu, GpuState.OWNED, ROLLOUT, Token(1, 2), moving.id)
        await store.commit(moving, Role.ACTOR, None)
        await store.commit(moving, Role.ROLLOUT, Layout())
        ended = await store.close(moving, Outcome.COMMITTED)
        assert [part.layout_in_force for part in ended.parts] == [None, Layout()]
        assert (await store.gpus())[gpu] == GpuRecord(gpu, GpuState.OWNED, ROLLOUT, Token(1, 2))

        back = replace(
            stop_of_actor(gpu, Token(1, 2)),
            moves=(Move(gpu, ROLLOUT, None, Token(1, 2)),),
            parts=(Part(Role.ROLLOUT, PartKind.STOP, Layout(), None),),
        )
        await release(store, await store.plan(back), gpu)
        await store.commit(back, Role.ROLLOUT, None)
        await store.close(back, Outcome.COMMITTED)
        assert (await store.gpus())[gpu] == GpuRecord(gpu, GpuState.FREE, None, Token(1, 2))
        assert [each.outcome for each in await store.transitions(JOB)] == [Outcome.COMMITTED] * 3

    async def test_a_token_granted_in_a_later_term_starts_its_counter_anew(
        self, world: World, store: CellStore
    ) -> None:
        await owned_by_actor(store, GPUS[0])
        await world.restart()
        after = await opened(world, term=3)
        moving = await after.plan(handover(GPUS[0], Token(1, 1)))
        await release(after, moving, GPUS[0])
        moving = await after.advance(moving, GPUS[0], from_state=MoveState.RELEASED, to_state=MoveState.ACQUIRING)
        assert moving.move(GPUS[0]).granted_token == Token(3, 1)

    async def test_a_plan_takes_all_its_gpus_or_none(self, store: CellStore) -> None:
        await store.plan(start_of_actor(GPUS[1]))
        want = await store.gpus()
        with pytest.raises(GpuBusy, match=r"node-a/1 is held by transition start"):
            await store.plan(start_of_actor(GPUS[0], GPUS[1], name="other"))
        assert await store.gpus() == want
        assert [each.id for each in await store.transitions(JOB)] == ["start"]

    async def test_of_many_plans_at_once_for_one_gpu_exactly_one_holds_it(self, world: World, store: CellStore) -> None:
        plans = [start_of_actor(GPUS[0], GPUS[index % 3 + 1], name=f"plan-{index}") for index in range(6)]
        clients = [await attached(world) for _ in plans]
        results = await asyncio.gather(
            *(client.plan(each) for client, each in zip(clients, plans, strict=True)), return_exceptions=True
        )
        winners = [each for each in results if isinstance(each, Transition)]
        assert len(winners) == 1
        assert all(isinstance(each, GpuBusy) for each in results if each is not winners[0])
        held = {gpu for gpu, record in (await store.gpus()).items() if record.transition}
        assert held == {move.gpu for move in winners[0].moves}

    @pytest.mark.parametrize(
        ("transition", "want"),
        [
            pytest.param(start_of_actor(GPUS[0], tokens=Token(0, 9)), StaleToken, id="on a token that is not its last"),
            pytest.param(handover(GPUS[0], Token(1, 0)), StaleToken, id="from an owner that it has not"),
            pytest.param(start_of_actor(GpuId("node-z/0")), UnknownGpu, id="with a gpu that is not registered"),
            pytest.param(
                replace(start_of_actor(GPUS[0]), planned_version=3), VersionConflict, id="on another version of the job"
            ),
        ],
    )
    async def test_an_illegal_plan_is_refused_and_changes_nothing(
        self, store: CellStore, transition: Transition, want: type[Exception]
    ) -> None:
        before = await store.gpus()
        with pytest.raises(want):
            await store.plan(transition)
        assert await store.gpus() == before
        assert await store.transitions(JOB) == ()

    async def test_a_plan_needs_the_version_of_the_job_and_not_its_number_of_writes(self, store: CellStore) -> None:
        saved = await store.save(JOB, b"one", expected_write=0, version=4)
        await store.save(JOB, b"progress", expected_write=saved.write, version=4)
        planned = replace(start_of_actor(GPUS[0]), planned_version=4)
        assert await store.plan(planned) == planned

    async def test_a_plan_repeated_finds_how_far_it_has_come(self, store: CellStore) -> None:
        planned = await store.plan(start_of_actor(GPUS[0]))
        want = await acquire(store, planned)
        assert await store.plan(planned) == want
        with pytest.raises(VersionConflict, match="another plan"):
            await store.plan(start_of_actor(GPUS[1]))

    async def test_a_step_repeated_changes_nothing_and_a_late_one_is_refused(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        moving = await store.plan(handover(GPUS[0], Token(1, 1)))
        released = await release(store, moving, GPUS[0])
        assert (
            await store.advance(moving, GPUS[0], from_state=MoveState.DRAINING, to_state=MoveState.RELEASED) == released
        )
        first = await store.advance(moving, GPUS[0], from_state=MoveState.RELEASED, to_state=MoveState.ACQUIRING)
        again = await store.advance(moving, GPUS[0], from_state=MoveState.RELEASED, to_state=MoveState.ACQUIRING)
        assert again == first
        with pytest.raises(VersionConflict, match="is acquiring, not draining"):
            await store.advance(moving, GPUS[0], from_state=MoveState.DRAINING, to_state=MoveState.RELEASED)

    async def test_several_gpus_take_a_step_together_or_not_at_all(self, store: CellStore) -> None:
        planned = await store.plan(start_of_actor(GPUS[0], GPUS[1]))
        await store.mark_lost(GPUS[1], Token(1, 0))
        steps = {"from_state": MoveState.PLANNED, "to_state": MoveState.ACQUIRING}
        with pytest.raises(GpuBusy, match=GPUS[1]):
            await store.advance(planned, GPUS[0], GPUS[1], **steps)
        assert await store.current_transitions(JOB) == (planned,)
        assert (await store.gpus())[GPUS[0]].state is GpuState.FREE
        await store.reclaim(GPUS[1], Token(1, 0))
        await store.advance(planned, GPUS[0], **steps)
        together = await store.advance(planned, GPUS[0], GPUS[1], **steps)
        assert [move.granted_token for move in together.moves] == [Token(1, 1), Token(1, 1)]
        assert {(await store.gpus())[gpu].owner for gpu in GPUS[:2]} == {ACTOR}

    async def test_a_grant_asked_for_by_many_at_once_is_one_token(self, world: World, store: CellStore) -> None:
        planned = await store.plan(start_of_actor(GPUS[0]))
        clients = [await attached(world) for _ in range(4)]
        results = await asyncio.gather(*(acquire(client, planned) for client in clients))
        assert {each.move(GPUS[0]).granted_token for each in results} == {Token(1, 1)}

    async def test_no_gpu_is_acquired_before_it_is_released(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        moving = await store.plan(handover(GPUS[0], Token(1, 1)))
        with pytest.raises(IllegalStep, match="the step after planned is draining"):
            await store.advance(moving, GPUS[0], from_state=MoveState.PLANNED, to_state=MoveState.ACQUIRING)
        assert (await store.gpus())[GPUS[0]].owner == ACTOR

    async def test_a_component_commits_only_when_all_its_gpus_are_acquiring(self, store: CellStore) -> None:
        planned = await store.plan(start_of_actor(GPUS[0], GPUS[1]))
        half = await store.advance(planned, GPUS[0], from_state=MoveState.PLANNED, to_state=MoveState.ACQUIRING)
        with pytest.raises(IllegalStep, match=r"node-a/1 is planned"):
            await store.commit(half, Role.ACTOR, Layout(dp=2))
        ready = await acquire(store, half)
        with pytest.raises(IllegalStep, match="cannot commit layout dp4"):
            await store.commit(ready, Role.ACTOR, Layout(dp=4))
        committed = await store.commit(ready, Role.ACTOR, Layout(dp=2))
        assert {move.state for move in committed.moves} == {MoveState.COMMITTED}
        assert committed.part(Role.ACTOR).state is PartState.COMMITTED
        assert await store.commit(ready, Role.ACTOR, Layout(dp=2)) == committed

    async def test_a_component_does_not_commit_a_gpu_that_was_lost_and_reclaimed_since_its_grant(
        self, store: CellStore
    ) -> None:
        ready = await acquire(store, await store.plan(start_of_actor(GPUS[0])))
        await store.mark_lost(GPUS[0], Token(1, 1))
        with pytest.raises(GpuBusy, match="lost"):
            await store.commit(ready, Role.ACTOR, Layout())
        await store.reclaim(GPUS[0], Token(1, 1))
        with pytest.raises(StaleToken, match=r"node-a/0 belongs to nobody under token 1\.1"):
            await store.commit(ready, Role.ACTOR, Layout())
        await store.close(ready, Outcome.ABORTED)
        assert (await store.gpus())[GPUS[0]] == GpuRecord(GPUS[0], GpuState.FREE, None, Token(1, 1))

    async def test_an_aborted_transition_cannot_commit_any_more(self, store: CellStore) -> None:
        ready = await acquire(store, await store.plan(start_of_actor(GPUS[0])))
        aborted = await store.close(ready, Outcome.ABORTED)
        with pytest.raises(VersionConflict, match="ended aborted"):
            await store.commit(ready, Role.ACTOR, Layout())
        assert await store.close(ready, Outcome.ABORTED) == aborted
        with pytest.raises(VersionConflict, match="before it could end committed"):
            await store.close(ready, Outcome.COMMITTED)

    async def test_of_a_commit_and_an_abort_of_one_transition_at_once_exactly_one_happens(
        self, world: World, store: CellStore
    ) -> None:
        ready = await acquire(store, await store.plan(start_of_actor(GPUS[0])))
        other = await attached(world)
        commit, abort = await asyncio.gather(
            store.commit(ready, Role.ACTOR, Layout()), other.close(ready, Outcome.ABORTED), return_exceptions=True
        )
        assert isinstance(commit, Transition) != isinstance(abort, Transition)
        (after,) = await store.transitions(JOB)
        assert after in (commit, abort)

    async def test_a_lost_gpu_is_not_offered_until_it_is_reclaimed(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        lost = await store.mark_lost(GPUS[0], Token(1, 1))
        assert lost == GpuRecord(GPUS[0], GpuState.LOST, ACTOR, Token(1, 1))
        assert await store.mark_lost(GPUS[0], Token(1, 1)) == lost
        with pytest.raises(GpuBusy, match="lost"):
            await store.plan(stop_of_actor(GPUS[0], Token(1, 1)))
        free = await store.reclaim(GPUS[0], Token(1, 1))
        assert free == GpuRecord(GPUS[0], GpuState.FREE, None, Token(1, 1))
        assert await store.reclaim(GPUS[0], Token(1, 1)) == free
        assert await store.plan(start_of_actor(GPUS[0], name="again", tokens=Token(1, 1)))

    async def test_losing_and_reclaiming_need_the_last_token(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        with pytest.raises(StaleToken, match=r"under token 1\.1"):
            await store.mark_lost(GPUS[0], Token(1, 0))
        with pytest.raises(IllegalStep, match="only a lost GPU"):
            await store.reclaim(GPUS[0], Token(1, 1))
        with pytest.raises(UnknownGpu):
            await store.mark_lost(GpuId("node-z/0"), Token(1, 0))

    async def test_a_transition_that_was_never_planned_is_unknown(self, store: CellStore) -> None:
        with pytest.raises(UnknownTransition, match="plan it first"):
            await store.close(start_of_actor(GPUS[0]), Outcome.ABORTED)

    async def test_each_job_sees_its_own_transitions(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        planned = await store.plan(start_of_actor(GPUS[1], name="open"))
        assert [each.id for each in await store.transitions(JOB)] == [planned.id, "start"]
        assert await store.transitions(JobId("other")) == ()

    async def test_a_decision_reads_open_transitions_and_those_that_it_knew_as_open(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        planned = await store.plan(start_of_actor(GPUS[1], name="open"))
        assert await store.current_transitions(JOB) == (planned,)
        (known, closed) = await store.current_transitions(
            JOB, known=[TransitionId(each) for each in ("start", "open", "unknown")]
        )
        assert (known, closed.id, closed.outcome) == (planned, "start", Outcome.COMMITTED)
        assert await store.current_transitions(JobId("other"), known=[TransitionId("start")]) == ()

    async def test_one_call_reads_gpus_transitions_and_the_time(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        planned = await store.plan(start_of_actor(GPUS[1], name="open"))
        before = await store.now_unix_ms()
        found = await store.ownership(JOB, known=[TransitionId("start")])
        assert found.gpus == await store.gpus()
        assert found.transitions == await store.current_transitions(JOB, known=[TransitionId("start")])
        assert planned in found.transitions
        assert before <= found.now_unix_ms <= await store.now_unix_ms()

    async def test_older_closed_transitions_and_the_results_of_their_commands_are_forgotten(
        self, store: CellStore
    ) -> None:
        for number in (9, 10, 11):
            planned = await store.plan(start_of_actor(GPUS[0], name=f"{JOB}/1/t{number}"))
            await store.close(planned, Outcome.ABORTED)
            await store.remember(JOB, CommandId(f"{JOB}/1/t{number}/acquire/a0"), b"done")
        opened = await store.plan(start_of_actor(GPUS[1], name=f"{JOB}/1/t1"))
        for _ in range(2):
            await store.forget_transitions(JOB, keep=2)
            kept = [each.id for each in await store.transitions(JOB)]
            assert kept == [opened.id, f"{JOB}/1/t10", f"{JOB}/1/t11"]
        found = [await store.recall(JOB, CommandId(f"{JOB}/1/t{number}/acquire/a0")) for number in (9, 10)]
        assert found == [None, b"done"]


class TestLeases:
    async def test_a_lease_expires_by_the_stores_clock_unless_it_is_renewed(
        self, world: World, store: CellStore
    ) -> None:
        await store.renew(ONE, ttl_ms=20)
        await store.renew(TWO, ttl_ms=LONG_MS)
        before = await store.now_unix_ms()
        await world.pass_ms(21)
        assert await store.now_unix_ms() >= before + 21
        assert await store.expired() == (ONE,)
        await store.renew(ONE, ttl_ms=LONG_MS)
        assert await store.expired() == ()

    async def test_a_released_lease_is_not_among_the_expired(self, world: World, store: CellStore) -> None:
        await store.renew(ONE, ttl_ms=1)
        await world.pass_ms(2)
        await store.release(ONE)
        await store.release(ONE)
        assert await store.expired() == ()

    async def test_a_renewal_says_whether_the_lease_was_in_force(self, world: World, store: CellStore) -> None:
        assert not await store.renew(ONE, ttl_ms=LONG_MS), "the first time"
        assert await store.renew(ONE, ttl_ms=20)
        await world.pass_ms(25)
        assert not await store.renew(ONE, ttl_ms=LONG_MS), "it had expired"
        await store.release(ONE)
        assert not await store.renew(ONE, ttl_ms=LONG_MS), "its expiry was dealt with"
        assert await store.renew(ONE, ttl_ms=LONG_MS)


async def in_force(store: CellStore, role: Role = Role.ACTOR) -> LeadRecord:
    """The present lead. The caller becomes lead itself if there is none."""
    return await store.campaign(JOB, role, instance=PROBE, endpoint="p:1", ttl_ms=LONG_MS)


class TestLeads:
    async def test_a_lead_stays_lead_while_it_renews(self, world: World, store: CellStore) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        assert (lead.instance, lead.endpoint, lead.epoch) == (ONE, "a:1", 1)
        refused = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=LONG_MS)
        assert refused == lead
        await world.pass_ms(2)
        renewed = await store.renew_lead(lead, ttl_ms=LONG_MS)
        assert renewed is not None
        assert renewed.epoch == 1
        assert renewed.expires_unix_ms > lead.expires_unix_ms
        assert await in_force(store) == renewed
        assert (await in_force(store, Role.ROLLOUT)).instance == PROBE, "each component has a lead of its own"

    async def test_an_expired_lead_is_followed_under_a_new_epoch_and_cannot_renew(
        self, world: World, store: CellStore
    ) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=5)
        await world.pass_ms(6)
        follower = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=LONG_MS)
        assert (follower.instance, follower.epoch) == (TWO, 2)
        assert await store.renew_lead(lead, ttl_ms=LONG_MS) is None
        await store.resign(lead)
        assert await in_force(store) == follower

    async def test_an_expired_lead_that_nobody_followed_may_renew(self, world: World, store: CellStore) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=5)
        await world.pass_ms(6)
        renewed = await store.renew_lead(lead, ttl_ms=LONG_MS)
        assert renewed == await in_force(store)

    async def test_a_restarted_instance_follows_itself_at_once_under_a_new_epoch(self, store: CellStore) -> None:
        former = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        again = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        assert again.epoch == former.epoch + 1
        assert await store.renew_lead(former, ttl_ms=LONG_MS) is None

    async def test_a_lead_that_resigned_is_followed_at_once(self, store: CellStore) -> None:
        lead = await store.campaign(JOB, Role.ACTOR, instance=ONE, endpoint="a:1", ttl_ms=LONG_MS)
        await store.resign(lead)
        assert await store.renew_lead(lead, ttl_ms=LONG_MS) is None
        follower = await store.campaign(JOB, Role.ACTOR, instance=TWO, endpoint="b:1", ttl_ms=LONG_MS)
        assert (follower.instance, follower.epoch) == (TWO, 2)

    async def test_of_many_that_campaign_at_once_all_see_the_same_lead(self, world: World, store: CellStore) -> None:
        clients = [await attached(world) for _ in range(5)]
        results = await asyncio.gather(
            *(
                client.campaign(
                    JOB, Role.ACTOR, instance=InstanceId(f"actor@{index}"), endpoint=f"{index}", ttl_ms=LONG_MS
                )
                for index, client in enumerate(clients)
            )
        )
        assert set(results) == {await in_force(store)}
        assert results[0].epoch == 1


class TestJobStates:
    async def test_a_state_is_saved_only_over_the_write_it_was_made_from(self, store: CellStore) -> None:
        assert await store.load(JOB) is None
        first = await store.save(JOB, b"\x00one\n1 2\n", expected_write=0, version=1)
        assert first == JobState(b"\x00one\n1 2\n", 1, 1)
        assert await store.load(JOB) == first
        with pytest.raises(VersionConflict, match="written 1 times, not 0"):
            await store.save(JOB, b"other", expected_write=0, version=1)
        assert await store.save(JOB, b"two", expected_write=1, version=1) == JobState(b"two", 2, 1)

    async def test_a_client_that_missed_a_write_saves_nothing_over_it(self, world: World, store: CellStore) -> None:
        await store.save(JOB, b"one", expected_write=0, version=1)
        other = await attached(world)
        await other.load(JOB)
        await other.save(JOB, b"two", expected_write=1, version=1)
        with pytest.raises(VersionConflict, match="written 2 times, not 1"):
            await store.save(JOB, b"mine", expected_write=1, version=1)
        assert await store.load(JOB) == JobState(b"two", 2, 1)

    async def test_the_version_of_a_saved_state_does_not_fall(self, store: CellStore) -> None:
        await store.save(JOB, b"one", expected_write=0, version=2)
        with pytest.raises(ValueError, match="cannot go back to 1"):
            await store.save(JOB, b"two", expected_write=1, version=1)

    async def test_of_many_states_saved_at_once_exactly_one_is_stored(self, world: World, store: CellStore) -> None:
        clients = [await attached(world) for _ in range(5)]
        results = await asyncio.gather(
            *(client.save(JOB, b"%d" % index, expected_write=0, version=0) for index, client in enumerate(clients)),
            return_exceptions=True,
        )
        stored = [each for each in results if isinstance(each, JobState)]
        assert stored == [await store.load(JOB)]
        assert sum(isinstance(each, VersionConflict) for each in results) == 4


class TestCommandsAndBoots:
    async def test_every_caller_gets_the_first_result_of_a_command(self, world: World, store: CellStore) -> None:
        command = CommandId("start/scale-up/actor/1")
        assert await store.recall(JOB, command) is None
        clients = [await attached(world) for _ in range(4)]
        results = await asyncio.gather(
            *(client.remember(JOB, command, b"result %d" % index) for index, client in enumerate(clients))
        )
        assert set(results) == {await store.recall(JOB, command)}
        assert await store.recall(JobId("other"), command) is None

    async def test_an_empty_command_result_is_stored_as_a_result(self, store: CellStore) -> None:
        await store.remember(JOB, CommandId("c"), b"")
        assert await store.remember(JOB, CommandId("c"), b"later") == b""

    async def test_boots_of_an_instance_are_never_the_same(self, world: World, store: CellStore) -> None:
        assert await store.next_boot(ONE) == 1
        clients = [await attached(world) for _ in range(4)]
        boots = await asyncio.gather(*(client.next_boot(ONE) for client in clients))
        assert sorted(boots) == [2, 3, 4, 5]
        assert await store.next_boot(TWO) == 1


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
