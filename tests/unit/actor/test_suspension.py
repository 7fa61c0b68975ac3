"""The actor's lead suspends fake ranks and resumes them, over the store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import JOB, NODES
from tests.unit.actor.actor_bench import FIRST, SECOND, ids, training
from tests.unit.actor.fake_ranks import PLENTY
from tests.unit.actor.resize_bench import SPARE, permit, until_asked
from tests.unit.actor.suspend_bench import HOME, SuspendBench
from tidegate.codec import decode_grants, decode_layout, fate_of
from tidegate.types import NO_TOKEN, GpuId, Grant, Layout, node_of
from tidegate.v1 import events_pb2


@asynccontextmanager
async def suspending(
    tmp_path: Path, *, num_permits: int = PLENTY, standby: str = "4", **actor: Any
) -> AsyncIterator[SuspendBench]:
    async with training(tmp_path, num_permits=num_permits, actor={"standby": standby, **actor}) as of:
        yield SuspendBench(of)


@pytest.mark.parametrize(
    ("gpus", "layout"),
    [([FIRST, SECOND], Layout(dp=2)), ([SPARE, FIRST, SECOND], Layout(dp=3)), ([SPARE], Layout())],
    ids=["as it was", "on more GPUs", "elsewhere"],
)
async def test_the_actor_lends_all_its_gpus_between_two_updates_and_the_open_iteration_goes_on(
    tmp_path: Path, gpus: list[str], layout: Layout
) -> None:
    async with suspending(tmp_path, num_permits=0) as at:
        await at.start()
        await at.of.scored(range(4))
        at.of.take(at.of.bench.open_iteration())
        await until_asked(at, 1)
        name = await at.ask_suspension()
        assert at.of.ranks.of[FIRST].suspensions == [], "an update is under way"
        permit(at, 1)
        (event,) = await at.of.bench.published("gpus_released")
        assert {grant.gpu for grant in decode_grants(event.gpus_released.grants)} == set(HOME)
        assert event.transition_id == name
        assert event.gpus_released.held_bytes == 6, "3 of each rank; the standby had no GPU to release"
        await at.free(name, event.gpus_released)
        instance = at.of.bench.instances[NODES[0]]
        assert await instance.workers(JOB) == tuple(Grant(GpuId(gpu), NO_TOKEN) for gpu in HOME)
        keepers = {gpu: at.of.ranks.of[gpu] for gpu in (FIRST, SECOND)}
        permit(at, 2)
        name = await at.ask_resumption(gpus, layout)
        event = await at.committed()
        assert (decode_layout(event.layout_committed.layout), event.transition_id) == (layout, name)
        assert decode_grants(event.layout_committed.grants) == at.members_after
        assert event.layout_committed.reshard.moved_bytes == 7
        assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
        weights = {tuple(at.of.ranks.of[gpu].weights) for gpu in gpus}
        assert weights == {("1.0.0", "1.0.1")}, "each update once, on all ranks"
        assert {gpu: at.of.ranks.of[gpu] for gpu in keepers} == keepers, "the same processes"
        assert [len(rank.worlds) for rank in keepers.values()] == [1, 1], "the same epoch"


async def test_groups_that_wait_for_their_minibatch_stay_held_while_the_actor_is_suspended(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        at.of.take(at.of.bench.open_iteration())
        await at.of.scored([0])
        await at.of.bench.changes.until(lambda: at.of.watch.prompts("fetch") == [0])
        await at.suspended()
        await at.of.scored([1, 2, 3])
        await at.of.bench.changes.until(lambda: sorted(at.of.watch.prompts("fetch")) == [0, 1, 2, 3])
        assert at.of.watch.prompts("ack") == []
        await at.ask_resumption([SECOND], Layout())
        assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
        assert sorted(at.of.watch.prompts("ack")) == [0, 1, 2, 3]


async def test_a_suspension_that_one_rank_cannot_keep_leaves_the_actor_as_it_was(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        at.of.ranks.of[SECOND].refuses = "prepare_suspension"
        name = await at.ask_suspension()
        event = await at.failed()
        assert event.transition_id == name
        assert f"{SECOND} does no prepare_suspension" in event.resize_failed.message
        assert at.of.ranks.of[FIRST].suspensions == ["prepare_suspension", "abort_suspension"]
        await _trains(at)


async def test_a_standby_that_came_after_the_last_join_is_no_obstacle(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        at.of.bench.instances[node_of(SPARE)].kill(SPARE)
        await at.suspended()
        name = await at.ask_resumption(HOME, Layout(dp=2))
        await at.committed()
        await at.commit_start(name)
        at.grants = at.members_after
        await at.of.bench.changes.until(lambda: at.of.ranks.of[SPARE].worlds == [])
        await at.suspended(nth=2)
        await at.ask_resumption([SPARE], Layout())
        await at.committed(3)
        await _trains(at, [SPARE])


async def test_a_suspension_that_was_closed_before_its_turn_is_not_made(tmp_path: Path) -> None:
    async with suspending(tmp_path, num_permits=0) as at:
        await at.start()
        await at.of.scored(range(4))
        at.of.take(at.of.bench.open_iteration())
        await until_asked(at, 1)
        name = await at.ask_suspension()
        await at.close(name)
        permit(at, 2)
        assert "is not open any more" in (await at.failed()).resize_failed.message
        assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
        assert at.of.ranks.of[FIRST].suspensions == []


async def test_a_rank_that_dies_as_the_actor_is_suspended_costs_the_suspension(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        at.of.ranks.of[SECOND].stays_in = "prepare_suspension"
        await at.ask_suspension()
        await at.dies(SECOND, "prepare_suspension")
        assert f"worker of {SECOND} died" in (await at.failed()).resize_failed.message
        assert not at.of.ranks.of[FIRST].is_suspended
        # The next one is for the rank that lives. The dead one's part is read from its node's memory.
        await at.close(f"{JOB}/1/t2")
        await at.lose(SECOND)
        assert [grant.gpu for grant in decode_grants((await at.suspended()).grants)] == [FIRST]
        await at.ask_resumption(HOME, Layout(dp=2))
        assert (await at.committed()).layout_committed.num_dead == 1
        await _trains(at)


async def test_a_keeper_that_dies_costs_an_epoch_and_nothing_else(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        await at.suspended()
        at.of.bench.instances[NODES[0]].kill(FIRST)
        await at.ask_resumption(HOME, Layout(dp=2))
        assert (await at.committed()).layout_committed.num_dead == 1
        assert [list(world.members) for world in at.of.ranks.of[SECOND].worlds] == [[0, 1, 2], [1, 2, 3]]
        await _trains(at)


async def test_a_resumption_that_cannot_be_prepared_is_made_again(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        await at.suspended()
        at.of.ranks.of[FIRST].refuses = "prepare_reshard"
        name = await at.ask_resumption([FIRST, SPARE], Layout(dp=2))
        failed = await at.component_failed()
        assert [grant.gpu for grant in failed.grants] == [FIRST, SPARE], "it names them: nothing else is lost"
        assert f"{FIRST} does no prepare_reshard" in failed.message
        assert not failed.fatal
        for gpu in (FIRST, SPARE):
            workers = await at.of.bench.instances[node_of(GpuId(gpu))].workers(JOB)
            assert Grant(GpuId(gpu), NO_TOKEN) in workers, "the GPU is free"
        await at.close(name)
        await at.lose(FIRST, SPARE)
        at.of.ranks.of[FIRST].refuses = ""
        await at.ask_resumption([FIRST, SPARE], Layout(dp=2))
        await at.committed()
        await _trains(at, gpus=(FIRST, SPARE))


async def test_state_that_is_lost_while_the_actor_is_suspended_ends_the_incarnation(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        await at.suspended()
        at.of.bench.instances[NODES[0]].kill(FIRST)
        at.of.ranks.of[SECOND].refuses = "prepare_reshard"
        await at.ask_resumption([SECOND], Layout())
        failed = await at.component_failed()
        assert (list(failed.grants), failed.what) == ([], events_pb2.Failed.WHAT_COMPONENT)


async def test_a_lead_that_suspended_nothing_says_so(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        await at.suspended()
        await at.of.bench.leads[-1].aclose()
        at.of.bench.new_lead()
        await at.ask_resumption(HOME, Layout(dp=2))
        failed = await at.component_failed()
        assert (list(failed.grants), failed.fatal) == ([], False)
        assert "this lead has suspended no actor" in failed.message


async def test_a_new_incarnation_ends_the_keepers(tmp_path: Path) -> None:
    async with suspending(tmp_path) as at:
        await at.start()
        await at.suspended()
        keepers = [at.of.ranks.of[gpu] for gpu in HOME]
        name, grants = await at.plan(HOME, Layout(dp=2))
        at.of.take(at.of.bench.scale_up(grants, incarnation=2))
        await at.committed()
        assert name
        assert all(at.of.ranks.of[gpu] not in keepers for gpu in HOME)


async def test_a_keeper_that_takes_much_memory_is_not_ended_for_it(tmp_path: Path) -> None:
    async with suspending(tmp_path, standby_memory_mib=1) as at:
        await at.start()
        await at.suspended()
        at.of.ranks.memory_bytes = (1 << 20) + 1
        # A standby's death makes the next epoch, in which memory is measured.
        at.of.bench.instances[NODES[1]].kill(SPARE)
        await at.ask_resumption([SECOND], Layout())
        await at.committed()
        assert Grant(GpuId(FIRST), NO_TOKEN) in await at.of.bench.instances[NODES[0]].workers(JOB)


async def _trains(at: SuspendBench, gpus: Sequence[str] = HOME) -> None:
    at.of.take(at.of.bench.open_iteration())
    await at.of.scored(range(4))
    assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
    assert {tuple(at.of.ranks.of[gpu].weights) for gpu in gpus} == {("1.0.0", "1.0.1")}
