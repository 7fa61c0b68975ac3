"""Every store overwrites no record unseen: states of jobs, results of commands and the boots of instances."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.contract.store_bench import GPUS, JOB, LONG_MS, ONE, TWO, attached, servers, store, world
from tests.contract.store_worlds import World
from tidegate.adapters import tables
from tidegate.adapters.cell_store import CellStore
from tidegate.adapters.cells import Cell, Session
from tidegate.ownership.records import StoreDamaged, VersionConflict
from tidegate.ports.store import JobState, Submissions
from tidegate.types import CommandId, Drain, JobId, NodeId, Role

__all__ = ["servers", "store", "world"]


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

    async def test_results_of_commands_that_come_no_more_are_forgotten(self, store: CellStore) -> None:
        names = [
            CommandId(f"{JOB}/1/{each}") for each in ("i8/open/e1/a0", "i8/open/e1/a1", "i9/open/e1/a0", "t1/up/a0")
        ]
        for name in names:
            await store.remember(JOB, name, b"done")
        await store.remember(JobId("other"), names[0], b"done")
        await store.forget_commands(JOB, keep={f"{JOB}/1/i8/open/e1"})
        found = [await store.recall(JOB, name) for name in names]
        assert found == [b"done", b"done", None, None]
        assert await store.recall(JobId("other"), names[0]) == b"done"

    async def test_boots_of_an_instance_are_never_the_same(self, world: World, store: CellStore) -> None:
        first = await store.next_boot(JOB, ONE)
        clients = [await attached(world) for _ in range(4)]
        boots = await asyncio.gather(*(client.next_boot(JOB, ONE) for client in clients))
        assert sorted(boots) == [first + number for number in (1, 2, 3, 4)]
        assert await store.next_boot(JOB, TWO) == first
        assert await store.next_boot(JobId("other"), ONE) == first, "another job's instance is another one"


_READS: dict[Cell, Callable[[CellStore], Awaitable[object]]] = {
    tables.gpu_cell(GPUS[0]): lambda store: store.gpus(),
    Cell("open", "job/1/t1"): lambda store: store.ownership(JOB),
    tables.state_cell(JOB): lambda store: store.load(JOB),
    tables.lead_cell(JOB, Role.ACTOR): lambda store: store.campaign(
        JOB, Role.ACTOR, instance=ONE, endpoint="127.0.0.1:1", ttl_ms=1
    ),
    tables.lease_cell(JOB, ONE): lambda store: store.expired(JOB, longest_ms=LONG_MS),
    tables.boot_cell(JOB, ONE): lambda store: store.next_boot(JOB, ONE),
    tables.RUN_ID: lambda store: store.identity(),
    tables.TERM: lambda store: store.identity(),
}


@pytest.mark.parametrize("cell", _READS, ids="/".join)
async def test_a_damaged_value_is_told_by_name_with_the_remedy_and_stays(
    world: World, store: CellStore, cell: Cell
) -> None:
    found = await store.identity()
    session = Session(found.run_id, found.term)
    before = (await world.cells().read(session, cells=(cell,))).cells
    await world.cells().swap(session, expected=before, writes={cell: b"\xffgarbage"})
    with pytest.raises(StoreDamaged, match=rf"'{cell.field}' of {cell.table} is damaged: .*--resume"):
        await _READS[cell](store)
    assert (await world.cells().read(None, cells=(cell,))).cells == {cell: b"\xffgarbage"}


@pytest.mark.parametrize(
    "payload", [b"", b"garbage", b"-5", b"007", b" 7", b"7\n", b"9" * 30, b"1000000000000"], ids=repr
)
async def test_a_stores_term_is_a_whole_number_of_at_most_12_digits_or_damaged(
    world: World, store: CellStore, payload: bytes
) -> None:
    found = await store.identity()
    session = Session(found.run_id, found.term)
    await world.cells().swap(session, expected={}, writes={tables.TERM: payload})
    for call in (store.identity(), store.gpus(), store.next_boot(JOB, ONE), world.client().attach()):
        with pytest.raises(StoreDamaged, match=r"'term' of store is damaged: not a term: .* to 999999999999.*prune"):
            await call


class TestSubmissions:
    async def test_records_of_several_jobs_are_written_all_or_none(self, world: World, store: CellStore) -> None:
        one, two = JobId("one"), JobId("two")
        assert await store.submissions() == Submissions({}, 0)
        await store.write_submissions({one: b"1"}, expected={one: None})
        with pytest.raises(VersionConflict, match="record of job one has changed"):
            await store.write_submissions({one: b"x", two: b"x"}, expected={one: None, two: None})
        await store.write_submissions({one: b"1", two: b"2"}, expected={one: None, two: None})
        repeated = await (await attached(world)).submissions()
        assert repeated == Submissions({one: b"1", two: b"2"}, 0), "what is there already is a repeat"
        await store.write_submissions({one: None}, expected={one: b"1"})
        assert (await store.submissions()).texts == {two: b"2"}

    async def test_of_rounds_that_were_decided_after_the_same_one_one_is_written(
        self, world: World, store: CellStore
    ) -> None:
        one, two = JobId("one"), JobId("two")
        other = await attached(world)
        for _ in range(2):
            await store.write_submissions({one: b"1"}, expected={one: None}, after_round=0)
        with pytest.raises(VersionConflict, match="round 1 has placed jobs, after round 0"):
            await other.write_submissions({two: b"2"}, expected={two: None}, after_round=0)
        await other.write_submissions({two: b"2"}, expected={two: None}, after_round=1)
        assert await store.submissions() == Submissions({one: b"1", two: b"2"}, 2)

    async def test_a_round_that_was_decided_before_a_node_was_drained_is_not_written(
        self, world: World, store: CellStore
    ) -> None:
        one, node = JobId("one"), NodeId("n1")
        for _ in range(2):
            await store.drain_node(node, Drain.STAY)
        assert await (await attached(world)).submissions() == Submissions({}, 1, {node: Drain.STAY})
        with pytest.raises(VersionConflict, match="round 1 has placed jobs, after round 0"):
            await store.write_submissions({one: b"1"}, expected={one: None}, after_round=0)
        for _ in range(2):
            await store.drain_node(node, Drain.LEAVE)
        assert await store.submissions() == Submissions({}, 2, {node: Drain.LEAVE})
        for _ in range(2):
            await store.drain_node(node, None)
        assert await store.submissions() == Submissions({}, 3)
        for reason in ("an upgrade", "another reason"):
            await store.pause(reason)
        assert await store.submissions() == Submissions({}, 4, paused="an upgrade")
        for _ in range(2):
            await store.pause("")
        assert await store.submissions() == Submissions({}, 5)

    async def test_a_cleared_job_has_its_record_alone_and_other_jobs_all_of_theirs(self, store: CellStore) -> None:
        other = JobId("other")
        for job in (JOB, other):
            await store.save(job, b"state", expected_write=0, version=1)
            await store.remember(job, CommandId("c"), b"done")
            await store.renew(job, ONE, ttl_ms=LONG_MS)
            assert await store.keep_config(job, "{}") == await store.keep_config(job, "{}")
            await store.write_submissions({job: b"over"}, expected={job: None})
        with pytest.raises(VersionConflict, match="record of job job has changed"):
            await store.clear_submission(JOB, b"cleared", expected=b"queued")
        assert await store.load(JOB) is not None
        for _ in range(2):
            await store.clear_submission(JOB, b"cleared", expected=b"over")
        assert (await store.submissions()).texts == {JOB: b"cleared", other: b"over"}
        name = await store.keep_config(other, "{}")
        found = [await store.load(JOB), await store.recall(JOB, CommandId("c")), await store.config_of(JOB, name)]
        assert found == [None, None, None]
        assert not await store.renew(JOB, ONE, ttl_ms=LONG_MS)
        assert await store.recall(other, CommandId("c")) == b"done"
        assert await store.config_of(other, name) == "{}"
        assert await store.renew(other, ONE, ttl_ms=LONG_MS)
        assert len(await store.gpus()) == len(GPUS)
