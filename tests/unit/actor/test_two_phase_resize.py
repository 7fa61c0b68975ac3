"""The actor's lead resizes fake ranks in two phases over the store in memory.

A resize takes place between two updates, and the store decides it. Failures before and after the decision are
tested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.actor.checkpoints import CheckpointStore
from tests.component_bench import JOB, NODES
from tests.unit.actor.actor_bench import FIRST, SECOND, ids
from tests.unit.actor.resize_bench import SPARE, ResizeBench, permit, resized, until_asked
from tidegate.codec import decode_grants, decode_layout, encode_grants, fate_of
from tidegate.ownership.records import PartState
from tidegate.types import NO_TOKEN, GpuId, Grant, Layout, Role
from tidegate.v1 import commands_pb2, events_pb2


@pytest.mark.parametrize(
    ("gpus", "layout"),
    [
        ([FIRST, SECOND, SPARE], Layout(dp=3)),
        ([SECOND], Layout()),
        ([SPARE, FIRST], Layout(tp=2)),
        ([FIRST, SECOND], Layout(pp=2)),
        ([SECOND, FIRST], Layout(dp=2)),
    ],
    ids=["grow", "shrink", "move", "another layout", "another order"],
)
async def test_the_actor_changes_between_two_updates_and_goes_on_with_the_same_iteration(
    tmp_path: Path, gpus: list[str], layout: Layout
) -> None:
    async with resized(tmp_path, num_permits=0) as at:
        await at.start()
        await at.of.scored(range(4))
        at.of.take(at.of.bench.open_iteration())
        await until_asked(at, 1)
        name = await at.ask(gpus, layout)
        assert at.of.ranks.of[FIRST].resharded == [], "an update is under way"
        permit(at, 1)
        event = await at.committed()
        assert (decode_layout(event.layout_committed.layout), event.transition_id) == (layout, name)
        assert decode_grants(event.layout_committed.grants) == at.members_after
        assert (event.layout_committed.reshard.moved_bytes, event.layout_committed.reshard.certificate) == (7, "1")
        assert event.layout_committed.num_dead == 0
        permit(at, 2)
        report = await at.of.report()
        assert report.trained == fate_of(ids(0, 1, 2, 3))
        assert report.num_duplicates_dropped == 0
        weights = {tuple(at.of.ranks.of[gpu].weights) for gpu in gpus}
        assert weights == {("1.0.0", "1.0.1")}, "each update once, on all ranks"
        transition = await at.stored(name)
        assert transition.part(Role.ACTOR).state is PartState.COMMITTED
        leaving = [slot for slot in (FIRST, SECOND) if slot not in gpus]
        assert (await at.of.bench.kinds()).count("gpus_released") == bool(leaving)


async def test_groups_that_wait_for_their_minibatch_stay_held_through_a_resize(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.take(at.of.bench.open_iteration())
        await at.of.scored([0])
        await at.of.bench.changes.until(lambda: at.of.watch.prompts("fetch") == [0])
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        assert at.of.watch.prompts("ack") == []
        await at.of.scored([1, 2, 3])
        assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
        assert sorted(at.of.watch.prompts("ack")) == [0, 1, 2, 3]


async def test_a_standby_is_in_the_world_from_the_start_and_joins_the_layout_without_a_new_epoch(
    tmp_path: Path,
) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        spare = at.of.ranks.of[SPARE]
        assert [list(world.members) for world in spare.worlds] == [[0, 1, 2]]
        assert spare.started == []
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        assert at.of.ranks.of[SPARE] is spare, "the same process"
        assert len(spare.worlds) == 1
        (progress,) = [
            event.progress for event in await at.of.bench.published("progress") if event.progress.phase == "stand_by"
        ]
        assert (progress.num_done, progress.num_total, progress.metrics["memory_bytes_max"]) == (1, 1, 1 << 20)


async def test_a_member_that_leaves_becomes_a_standby(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        await at.ask([FIRST], Layout())
        await at.committed()
        (released,) = await at.of.bench.published("gpus_released")
        assert [grant.gpu for grant in released.gpus_released.grants] == [SECOND]
        instance = at.of.bench.instances[NODES[0]]
        assert Grant(GpuId(SECOND), NO_TOKEN) in await instance.workers(JOB)
        assert len(instance.started) == 2


async def test_a_dead_standby_is_replaced_by_a_cold_worker_in_a_new_epoch(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.bench.instances[NODES[1]].kill(SPARE)
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        assert [list(world.members) for world in at.of.ranks.of[FIRST].worlds] == [[0, 1, 2], [0, 1, 3]]
        assert [list(world.members) for world in at.of.ranks.of[SPARE].worlds] == [[0, 1, 3]]
        first, second = (world.epoch for world in at.of.ranks.of[FIRST].worlds)
        assert second == first + 1


async def test_a_standby_that_takes_too_much_memory_is_ended_and_its_slot_starts_cold(tmp_path: Path) -> None:
    async with resized(tmp_path, standby_memory_mib=1) as at:
        at.of.ranks.memory_bytes = (1 << 20) + 1
        await at.start()
        assert await at.of.bench.instances[NODES[1]].workers(JOB) == ()


@pytest.mark.parametrize("member", [FIRST, SECOND, SPARE])
async def test_a_reshard_that_one_member_cannot_prepare_leaves_the_actor_as_it_was(tmp_path: Path, member: str) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.ranks.of[member].refuses = "prepare_reshard"
        await at.ask([FIRST, SECOND], Layout(pp=2))
        event = await at.failed()
        assert f"{member} does no prepare_reshard" in event.resize_failed.message
        assert (await at.stored(event.transition_id)).part(Role.ACTOR).state is PartState.PLANNED
        assert all(rank.prepared is None for rank in at.of.ranks.of.values())
        await at.close(event.transition_id)
        at.of.take(at.of.bench.open_iteration())
        await at.of.scored(range(4))
        assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))


@pytest.mark.parametrize("member", [FIRST, SECOND, SPARE])
async def test_a_reshard_in_which_a_member_hangs_is_aborted_and_the_old_layout_continues_in_the_next_epoch(
    tmp_path: Path, member: str
) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.ranks.of[member].hangs_in = "prepare_reshard"
        await at.ask([FIRST, SECOND], Layout(pp=2))
        event = await at.failed()
        assert f"{member} did not answer prepare_reshard" in event.resize_failed.message
        await at.close(event.transition_id)
        await _trains_in_the_next_epoch(at, [0, 1, 2])


async def test_a_standby_that_is_lost_as_the_others_switch_costs_an_epoch_and_nothing_else(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.ranks.of[SPARE].hangs_in = "commit_reshard"
        await at.ask([SECOND, FIRST], Layout(dp=2))
        assert decode_grants((await at.committed()).layout_committed.grants) == at.members_after
        await _trains_in_the_next_epoch(at, [0, 1, 3])


async def _trains_in_the_next_epoch(at: ResizeBench, members: list[int]) -> None:
    """The first iteration trains completely, in the second epoch, which has these members."""
    at.of.take(at.of.bench.open_iteration())
    await at.of.scored(range(4))
    assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
    first, second = at.of.ranks.of[FIRST].worlds
    assert (second.epoch, list(second.members)) == (first.epoch + 1, members)
    assert "failed" not in await at.of.bench.kinds()


async def test_a_standby_that_dies_during_an_iteration_delays_nothing(tmp_path: Path) -> None:
    async with resized(tmp_path, num_permits=0) as at:
        await _in_first_update(at)
        at.of.bench.instances[NODES[1]].kill(SPARE)
        permit(at, 2)
        await _check_trained_once(at)
        assert len(at.of.ranks.of[FIRST].worlds) == 1


async def test_a_resize_that_was_closed_before_its_turn_sends_the_ranks_nothing(tmp_path: Path) -> None:
    async with resized(tmp_path, num_permits=0) as at:
        await at.start()
        await at.of.scored(range(4))
        at.of.take(at.of.bench.open_iteration())
        await until_asked(at, 1)
        name = await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.close(name)
        permit(at, 2)
        assert "not open any more" in (await at.failed()).resize_failed.message
        assert at.of.ranks.of[FIRST].resharded == []
        assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))


async def test_a_store_that_refuses_the_commit_leaves_the_actor_as_it_was_in_an_epoch_without_the_new_members(
    tmp_path: Path,
) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        name, members = await at.plan([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.store.mark_lost(SPARE, members[2].token)
        at.send(name, members, Layout(dp=3))
        assert "n1/0 is lost" in (await at.failed()).resize_failed.message
        first, spare = at.of.ranks.of[FIRST], at.of.ranks.of[SPARE]
        back = ["prepare_reshard", "abort_reshard", "prepare_reshard", "commit_reshard"]
        assert (first.resharded, list(first.worlds[-1].members)) == (back, [0, 1, 3])
        assert (spare.resharded[-1], spare.member) == ("commit_reshard", 3), "another process stands by"
        at.of.take(at.of.bench.open_iteration())
        await at.of.scored(range(4))
        assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))


async def test_a_store_whose_answer_to_the_commit_is_lost_is_asked_again(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        name, members = await at.plan([SECOND, FIRST], Layout(dp=2))
        at.of.bench.server.num_answers_to_lose = 1
        at.send(name, members, Layout(dp=2))
        await at.committed()
        assert at.of.ranks.of[FIRST].resharded == ["prepare_reshard", "commit_reshard"]
        assert at.of.bench.server.num_answers_to_lose == 0


async def test_a_member_that_does_not_switch_after_the_commit_costs_the_incarnation(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.ranks.of[SECOND].refuses = "commit_reshard"
        name = await at.ask([FIRST, SECOND], Layout(pp=2))
        (failed,) = await at.of.bench.published("failed")
        assert failed.failed.what == events_pb2.Failed.WHAT_COMPONENT
        assert (list(failed.failed.grants), failed.failed.fatal) == ([], False)
        assert (await at.stored(name)).part(Role.ACTOR).state is PartState.COMMITTED
        assert "resize_failed" not in await at.of.bench.kinds()


async def test_a_rank_that_is_late_at_the_switch_costs_an_epoch(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        first, second = at.of.ranks.of[FIRST], at.of.ranks.of[SECOND]
        second.is_late = True
        await at.ask([FIRST, SECOND], Layout(tp=2))
        await at.committed()
        await at.of.bench.changes.until(lambda: len(first.resharded) == 4)
        assert len(first.worlds) == 2
        assert second.is_in_epoch
        assert "failed" not in await at.of.bench.kinds()


async def test_a_stop_does_not_wait_for_a_resize_that_waits_for_an_update(tmp_path: Path) -> None:
    async with resized(tmp_path, num_permits=0) as at:
        await at.start()
        await at.of.scored(range(4))
        at.of.take(at.of.bench.open_iteration())
        await until_asked(at, 1)
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        header = at.of.bench.header(transition="stop")
        at.of.take(commands_pb2.ScaleDownRequest(header=header, grants=encode_grants(at.grants)))
        (released,) = await at.of.bench.published("gpus_released")
        assert decode_grants(released.gpus_released.grants) == at.grants


async def _in_first_update(at: ResizeBench) -> None:
    """Start, and go up to the first update, which waits for its permits."""
    await at.start()
    await at.of.scored(range(4))
    at.of.take(at.of.bench.open_iteration())
    await until_asked(at, 1)


async def _check_trained_once(at: ResizeBench) -> None:
    assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
    assert at.of.ranks.of[FIRST].weights == at.of.ranks.of[SECOND].weights == ["1.0.0", "1.0.1"]
    rows = at.of.journal()
    assert [(row["update"], row["loss"]) for row in rows] == [("1.0.0", 0.25), ("1.0.1", 0.25)]
    assert "failed" not in await at.of.bench.kinds()


async def test_an_update_whose_rank_died_after_it_was_made_is_not_made_again(tmp_path: Path) -> None:
    async with resized(tmp_path, num_permits=0) as at:
        await _in_first_update(at)
        at.of.ranks.permits[FIRST].release()
        await at.of.bench.changes.until(lambda: len(at.of.ranks.of[FIRST].trained) == 1)
        at.of.bench.instances[NODES[0]].kill(SECOND)
        await at.replace_dead(SECOND)
        event = await at.committed()
        assert decode_grants(event.layout_committed.grants) == at.members_after
        permit(at, 2)
        await _check_trained_once(at)
        assert len(at.of.ranks.of[FIRST].trained) == 2
        assert sorted(at.of.watch.prompts("ack")) == [0, 1, 2, 3]


async def test_an_update_that_a_death_prevents_is_made_once_the_rank_is_replaced(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.take(at.of.bench.open_iteration())
        first = at.of.ranks.of[FIRST]
        await at.of.bench.published("weights_published")
        first.refuses = "train"
        at.of.bench.instances[NODES[0]].kill(SECOND)
        await at.of.scored(range(4))
        await at.of.bench.changes.until(lambda: first.num_refused == 1)
        first.refuses = ""
        await at.replace_dead(SECOND)
        await at.committed()
        await _check_trained_once(at)
        assert [list(world.members) for world in first.worlds] == [[0, 1, 2], [0, 2, 3]]
        assert first.resharded == ["prepare_reshard", "commit_reshard"]


async def _trains_whole(at: ResizeBench, gpus: Sequence[str]) -> None:
    at.of.take(at.of.bench.open_iteration())
    await at.of.scored(range(4))
    assert (await at.of.report()).trained == fate_of(ids(0, 1, 2, 3))
    assert {tuple(at.of.ranks.of[gpu].weights) for gpu in gpus} == {("1.0.0", "1.0.1")}
    assert "failed" not in await at.of.bench.kinds()


def _staying(at: ResizeBench, gpu: str, kind: str) -> None:
    at.of.ranks.of[gpu].stays_in = kind


@pytest.mark.parametrize("victim", [FIRST, SECOND], ids=["it leaves", "it stays"])
async def test_a_member_that_dies_before_the_commit_is_replaced_in_the_old_layout(tmp_path: Path, victim: str) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        _staying(at, victim, "prepare_reshard")
        name = await at.ask([SECOND, SPARE], Layout(tp=2))
        await at.dies(victim, "prepare_reshard")
        assert f"worker of {victim} died" in (await at.failed()).resize_failed.message
        await at.close(name)
        await at.lose(SPARE)
        await at.replace_dead(victim)
        committed = (await at.committed()).layout_committed
        assert (decode_layout(committed.layout), decode_grants(committed.grants)) == (Layout(dp=2), at.members_after)
        assert committed.num_dead == 1
        await _trains_whole(at, [FIRST, SECOND])


async def test_a_new_member_that_dies_before_the_commit_costs_the_resize_and_an_epoch(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        _staying(at, SPARE, "prepare_reshard")
        await at.ask([SECOND, SPARE], Layout(tp=2))
        await at.dies(SPARE, "prepare_reshard")
        assert f"worker of {SPARE} died" in (await at.failed()).resize_failed.message
        await _trains_whole(at, [FIRST, SECOND])
        assert [list(world.members) for world in at.of.ranks.of[FIRST].worlds] == [[0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize("victim", [FIRST, SECOND, SPARE], ids=["it leaves", "it stays", "it comes"])
async def test_a_member_that_dies_after_the_commit_is_replaced_in_the_new_layout(tmp_path: Path, victim: str) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        _staying(at, victim, "commit_reshard")
        name = await at.ask([SECOND, SPARE], Layout(tp=2))
        await at.dies(victim, "commit_reshard")
        committed = (await at.committed()).layout_committed
        assert (decode_layout(committed.layout), decode_grants(committed.grants)) == (Layout(tp=2), at.members_after)
        await at.of.bench.published("gpus_released")
        at.grants, at.layout = at.members_after, Layout(tp=2)
        await at.close(name)
        if victim != FIRST:
            await at.replace_dead(victim)
            assert decode_grants((await at.committed(nth=3)).layout_committed.grants) == at.members_after
        await _trains_whole(at, [SECOND, SPARE])


async def test_the_death_of_all_members_of_a_new_layout_costs_the_incarnation(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        _staying(at, SPARE, "commit_reshard")
        await at.ask([SPARE], Layout())
        await at.dies(SPARE, "commit_reshard")
        (failed,) = await at.of.bench.published("failed")
        assert "all 1 members died" in failed.failed.message


async def test_a_member_that_dies_while_another_is_replaced_is_replaced_as_well(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        at.grants, at.layout = at.members_after, Layout(dp=3)
        await at.close(f"{JOB}/1/t2")
        at.of.bench.instances[NODES[1]].kill(SPARE)
        _staying(at, SECOND, "prepare_reshard")
        name = await at.replace_dead(SPARE)
        await at.dies(SECOND, "prepare_reshard")
        assert f"worker of {SECOND} died" in (await at.failed()).resize_failed.message
        await at.close(name)
        await at.lose(SECOND, SPARE)
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed(nth=3)
        await _trains_whole(at, [FIRST, SECOND, SPARE])


async def test_a_standby_that_dies_while_it_joins_the_next_epoch_is_excluded_from_a_further_one(tmp_path: Path) -> None:
    async with resized(tmp_path, standby="4-5") as at:
        await at.start()
        _staying(at, SPARE, "prepare_reshard")
        at.of.ranks.of["n1/1"].stays_in = "join_world"
        await at.ask([SECOND, SPARE], Layout(tp=2))
        await at.dies(SPARE, "prepare_reshard")
        await at.dies("n1/1", "join_world")
        await at.failed()
        await _trains_whole(at, [FIRST, SECOND])
        assert len(at.of.ranks.of[FIRST].worlds) == 3


@pytest.mark.parametrize("kind", ["save", "publish"])
@pytest.mark.parametrize("victim", [FIRST, SECOND])
async def test_a_save_or_publish_that_a_death_interrupts_is_done_again_by_all_ranks(
    tmp_path: Path, kind: str, victim: str
) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        await _trains_whole(at, [FIRST, SECOND])
        _staying(at, victim, kind)
        at.of.close()
        await at.dies(victim, kind)
        await at.replace_dead(victim)
        *_, published = await at.of.bench.published("weights_published", count=2)
        (saved,) = await at.of.bench.published("checkpoint_saved")
        kept = CheckpointStore(at.of.bench.folder.checkpoints, keep=2).load(saved.checkpoint_saved.name)
        assert [file.file for file in kept.files] == ["rank0", "rank1"]
        assert published.weights_published.snapshot.weights_checksum == f"{2:016x}", "of two updates"
        assert decode_grants(published.weights_published.snapshot.grants) == at.members_after
        assert "failed" not in await at.of.bench.kinds()


async def test_a_publish_that_a_death_interrupts_is_done_again_in_the_layout_of_that_time(
    tmp_path: Path,
) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        await _trains_whole(at, [FIRST, SECOND])
        _staying(at, SECOND, "publish")
        at.of.close()
        await at.dies(SECOND, "publish")
        await at.lose(SECOND)
        await at.ask([FIRST], Layout())
        *_, published = await at.of.bench.published("weights_published", count=2)
        assert [shard.file for shard in published.weights_published.snapshot.shards] == ["rank0"]
        assert (2, (0,)) in at.of.bench.instances[NODES[0]].drops


async def test_a_lost_rank_that_cannot_be_replaced_costs_the_incarnation(tmp_path: Path) -> None:
    async with resized(tmp_path, num_permits=0) as at:
        await _in_first_update(at)
        at.of.ranks.of[FIRST].refuses = "prepare_reshard"
        at.of.ranks.permits[FIRST].release()
        at.of.bench.instances[NODES[0]].kill(SECOND)
        name = await at.replace_dead(SECOND)
        (failed,) = await at.of.bench.published("failed")
        assert f"resize {name}" in failed.failed.message
        assert (list(failed.failed.grants), failed.failed.fatal) == ([], False)
        assert "resize_failed" not in await at.of.bench.kinds()
        assert at.of.journal() == []


async def test_an_update_that_a_living_rank_refuses_fails_the_iteration(tmp_path: Path) -> None:
    async with resized(tmp_path) as at:
        await at.start()
        at.of.ranks.of[FIRST].refuses = "train"
        await at.of.scored(range(4))
        at.of.take(at.of.bench.open_iteration())
        (failed,) = await at.of.bench.published("failed")
        assert f"{FIRST} does no train" in failed.failed.message
