"""Every store keeps the owner of each GPU under growing tokens, and each transition as far as it has come."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.contract.store_bench import (
    ACTOR,
    GPUS,
    JOB,
    ROLLOUT,
    acquire,
    attached,
    handover,
    opened,
    owned_by_actor,
    release,
    servers,
    start_of_actor,
    stop_of_actor,
    store,
    world,
)
from tests.contract.store_worlds import World
from tidegate.adapters import tables
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Session
from tidegate.ownership.records import (
    GpuBusy,
    GpuRecord,
    GpuState,
    IllegalStep,
    Move,
    MoveState,
    Outcome,
    Part,
    PartKind,
    PartState,
    StaleToken,
    Transition,
    UnknownGpu,
    UnknownTransition,
    VersionConflict,
)
from tidegate.types import GpuId, JobId, Layout, Role, Token, TransitionId

__all__ = ["servers", "store", "world"]


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

    @pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"id": "start"}', b"\xff\xfe"])
    async def test_a_closed_transition_that_cannot_be_read_is_left_out(
        self, world: World, store: CellStore, damage: bytes
    ) -> None:
        await owned_by_actor(store, GPUS[0])
        planned = await store.plan(start_of_actor(GPUS[1], name="open"))
        cell = tables.closed_cell(JOB, TransitionId("start"))
        cells, found = world.cells(), await store.identity()
        session = Session(found.run_id, found.term)
        stored = (await cells.read(session, cells=(cell,))).cells
        assert await cells.swap(session, expected=stored, writes={cell: damage})
        assert await store.transitions(JOB) == (planned,)
        assert (await store.ownership(JOB, known=[TransitionId("start")])).transitions == (planned,)
        await cells.aclose()

    async def test_one_call_reads_gpus_transitions_and_the_time(self, store: CellStore) -> None:
        await owned_by_actor(store, GPUS[0])
        planned = await store.plan(start_of_actor(GPUS[1], name="open"))
        before = await store.now_unix_ms()
        found = await store.ownership(JOB, known=[TransitionId("start")])
        assert found.gpus == await store.gpus()
        assert found.transitions == await store.current_transitions(JOB, known=[TransitionId("start")])
        assert planned in found.transitions
        assert before <= found.now_unix_ms <= await store.now_unix_ms()

    async def test_older_closed_transitions_are_forgotten(self, store: CellStore) -> None:
        for number in (9, 10, 11):
            planned = await store.plan(start_of_actor(GPUS[0], name=f"{JOB}/1/t{number}"))
            await store.close(planned, Outcome.ABORTED)
        opened = await store.plan(start_of_actor(GPUS[1], name=f"{JOB}/1/t1"))
        for _ in range(2):
            await store.forget_transitions(JOB, keep=2)
            kept = [each.id for each in await store.transitions(JOB)]
            assert kept == [opened.id, f"{JOB}/1/t10", f"{JOB}/1/t11"]
