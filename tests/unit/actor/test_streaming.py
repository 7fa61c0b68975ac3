"""A minibatch trains while its groups arrive. What an interruption drops is counted and trained again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.actor.actor_bench import FIRST, SECOND, Training, ids, training
from tests.unit.actor.fake_ranks import PLENTY
from tests.unit.actor.resize_bench import SPARE, ResizeBench, permit, until_asked
from tidegate.codec import fate_of
from tidegate.types import Layout, node_of
from tidegate.v1 import commands_pb2, events_pb2

TOKENS = 3
"""The response tokens of a group of two samples."""
STREAMED: dict[str, Any] = {
    "algorithm": {"prompts_per_iteration": 8, "n_minibatches": 2},
    "actor": {"micro_batch_size": 2},
}
"""Minibatches of four groups. A group fills a micro-batch, so that two make a portion for two replicas."""

STANDBY: dict[str, Any] = {"standby": "4"}
REPRODUCIBLE: dict[str, Any] = {**STANDBY, "num_logical_shards": 4}


@asynccontextmanager
async def streaming(tmp_path: Path, *, num_permits: int = PLENTY, **changes: Any) -> AsyncIterator[Training]:
    sections = {name: {**STREAMED.get(name, {}), **changes.get(name, {})} for name in {*STREAMED, *changes}}
    async with training(tmp_path, num_permits=num_permits, **sections) as of:
        yield of


async def until_accumulated(of: Training, count: int) -> None:
    """Wait until both ranks have so many portions before the last of an update, dropped ones included."""

    def have_all() -> bool:
        return [len(of.ranks.of[gpu].accumulated) for gpu in (FIRST, SECOND) if gpu in of.ranks.of] == [count, count]

    await of.bench.changes.until(have_all)


async def begun(of: Training) -> ResizeBench:
    """Start the actor on two slots, with an open iteration whose first portion is there."""
    at = ResizeBench(of)
    await at.start()
    of.take(of.bench.open_iteration())
    await of.scored([0, 1])
    return at


def portions(of: Training, gpu: str = FIRST) -> list[tuple[int, list[int]]]:
    """The number before and the prompts of each portion before the last of an update."""
    return [
        (each.num_before, list(dict.fromkeys(sample.id.prompt for sample in each.samples)))
        for each in of.ranks.of[gpu].accumulated
    ]


def hold(of: Training, *, holds: bool, iteration: int = 0) -> None:
    request = commands_pb2.HoldTrainingRequest(header=of.bench.header(), iteration=iteration, holds=holds)
    lead = of.take()
    lead.check(request)
    lead.take(request)


async def pictures(of: Training) -> list[events_pb2.Training]:
    return [event.training for event in of.bench.events.all if event.HasField("training")]


async def test_a_minibatch_trains_in_portions_and_makes_one_update(tmp_path: Path) -> None:
    async with streaming(tmp_path) as of:
        of.start()
        await of.scored([0, 1])
        await until_accumulated(of, 1)
        await of.scored([2])
        await of.scored([3])
        await of.until_acked(0, 1, 2, 3)
        await of.scored(range(4, 8))
        report = await of.report()
        rows = of.journal()
    assert portions(of) == [(0, [0, 1])]
    assert of.ranks.prompts() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(train.bundle_sizes) for train in of.ranks.same().trained] == [[2] * 4] * 2
    assert [(row["update"], row["dropped_tokens"]) for row in rows] == [("1.0.0", 0), ("1.0.1", 0)]
    assert report.trained == fate_of(ids(*range(8)))


async def test_in_fixed_order_the_longest_complete_prefix_is_trained(tmp_path: Path) -> None:
    async with streaming(tmp_path) as of:
        of.start()
        await of.scored([3, 1, 0])
        await until_accumulated(of, 1)
        await of.scored([2])
        await of.until_acked(0, 1, 2, 3)
    assert portions(of) == [(0, [0, 1])]
    assert of.ranks.prompts() == [[0, 1, 2, 3]]


async def test_in_arrival_order_what_is_there_is_trained(tmp_path: Path) -> None:
    async with streaming(tmp_path, algorithm={"minibatch_order": "arrival"}) as of:
        of.start()
        await of.scored([6, 3])
        await until_accumulated(of, 1)
        await of.scored([5, 1])
        await of.until_acked(6, 3, 5, 1)
    assert portions(of) == [(0, [6, 3])]
    assert of.ranks.prompts() == [[6, 3, 5, 1]]


async def test_without_streaming_a_minibatch_waits_for_its_last_group(tmp_path: Path) -> None:
    async with streaming(tmp_path, actor={"streams_minibatches": False}) as of:
        of.start()
        await of.scored(range(8))
        await of.report()
    assert portions(of) == []
    assert of.ranks.prompts() == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_nothing_is_acknowledged_between_portions(tmp_path: Path) -> None:
    async with streaming(tmp_path) as of:
        of.start()
        await of.scored([0, 1])
        await until_accumulated(of, 1)
        assert of.watch.prompts("ack") == []
        assert of.journal() == []


async def test_a_filtered_group_is_in_no_portion_and_is_accounted_with_its_minibatch(tmp_path: Path) -> None:
    async with streaming(tmp_path, algorithm={"filter_zero_std": True}) as of:
        of.start()
        await of.scored([1, 2], rewards=(1.0, 1.0))
        await of.scored([0, 3])
        await of.until_acked(0, 1, 2, 3)
        await of.scored([4, 5, 6, 7])
        report = await of.report()
    assert of.ranks.prompts() == [[0, 3], [4, 5, 6, 7]]
    assert [fate.reason for fate in report.filtered] == ["zero_std"]


async def test_a_picture_is_at_a_boundary_only_while_nothing_is_begun(tmp_path: Path) -> None:
    async with streaming(tmp_path) as of:
        of.start()
        await of.bench.published("training")
        await of.scored([0, 1])
        await until_accumulated(of, 1)
        (_, begun) = [event.training for event in await of.bench.published("training", count=2)]
        assert (begun.is_at_boundary, begun.num_taken, begun.HasField("closes_at_ms")) == (False, 2, False)
        await of.scored(range(2, 8))
        await of.report()
        last = (await pictures(of))[-1]
    assert (last.is_at_boundary, last.num_taken, last.num_minibatches_done) == (True, 8, 2)


async def test_a_held_lead_begins_no_minibatch_and_goes_on_when_it_is_let_go(tmp_path: Path) -> None:
    async with streaming(tmp_path) as of:
        of.start()
        await of.bench.published("training")
        hold(of, holds=True)
        await of.scored(range(8))
        await of.bench.changes.until(lambda: len(of.watch.prompts("fetch")) == 8)
        hold(of, holds=True)
        assert [rank.num_asked for rank in of.ranks.of.values() if rank.started] == [0, 0]
        hold(of, holds=False)
        await of.report()
        assert all(each.is_at_boundary for each in (await pictures(of))[:1])
    assert of.ranks.prompts() == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_a_held_lead_finishes_the_minibatch_that_it_began(tmp_path: Path) -> None:
    async with streaming(tmp_path) as of:
        of.start()
        await of.scored([0, 1])
        await until_accumulated(of, 1)
        hold(of, holds=True)
        await of.scored(range(2, 8))
        await of.until_acked(0, 1, 2, 3)
        assert of.ranks.prompts() == [[0, 1, 2, 3]]
        hold(of, holds=False)
        await of.report()
    assert of.ranks.prompts() == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_a_hold_ends_with_its_iteration(tmp_path: Path) -> None:
    async with streaming(tmp_path) as of:
        of.start()
        await of.scored([0, 1, 2, 3])
        await of.until_acked(0, 1, 2, 3)
        await of.scored([4, 5])
        await until_accumulated(of, 1)
        hold(of, holds=True)
        await of.scored([6, 7])
        await of.report()
        of.close()
        of.take(of.bench.open_iteration(1))
        await of.scored(range(8, 16), iteration=1, version=1)
        await of.bench.published("iteration_reported", count=2)
        with pytest.raises(RuntimeError, match="iteration 0 is not open"):
            hold(of, holds=False)
    assert len(of.ranks.prompts()) == 4


async def test_a_minibatch_goes_on_after_resizes_with_what_is_trained(tmp_path: Path) -> None:
    async with streaming(tmp_path, actor=STANDBY, algorithm={"prompts_per_iteration": 16, "n_minibatches": 2}) as of:
        at = await begun(of)
        await until_accumulated(of, 1)
        name = await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        await at.close(name)
        at.grants, at.layout = at.members_after, Layout(dp=3)
        await of.scored([2, 3, 4])
        await of.bench.changes.until(lambda: len(of.ranks.of[SPARE].accumulated) == 1)
        await at.ask([SPARE], Layout())
        await at.committed(3)
        await of.scored(range(5, 16))
        report = await of.report()
        rows = of.journal()
    assert portions(of) == [(0, [0, 1]), (1, [2, 3, 4])]
    assert portions(of, SPARE)[0] == (1, [2, 3, 4])
    trained = [{sample.id.prompt for sample in train.samples} for train in of.ranks.of[SPARE].trained]
    assert trained == [set(range(8)), set(range(8, 16))]
    assert [row["dropped_tokens"] for row in rows] == [0, 0]
    assert report.trained == fate_of(ids(*range(16)))


async def test_a_resize_comes_before_the_portions_whose_groups_are_there(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_permits=0, actor=STANDBY) as of:
        at = await begun(of)
        await until_asked(at, 1)
        name = await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await of.scored(range(2, 8))
        await of.bench.changes.until(lambda: len(of.watch.prompts("fetch")) == 8)
        permit(at, 1)
        assert (await at.committed()).transition_id == name
        permit(at, PLENTY)
        await of.report()
        rows = of.journal()
    assert [row["dropped_tokens"] for row in rows] == [0, 0]
    assert [[sample.id.prompt for sample in train.samples[::2]] for train in of.ranks.of[SPARE].trained] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


async def test_a_resize_into_another_epoch_drops_the_portions(tmp_path: Path) -> None:
    async with streaming(tmp_path, actor=STANDBY) as of:
        at = await begun(of)
        await until_accumulated(of, 1)
        # Nobody stands by on the spare slot any more, so a new member joins the world.
        of.bench.instances[node_of(SPARE)].kill(SPARE)
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        await of.scored(range(2, 8))
        await of.report()
        rows = of.journal()
    assert [row["dropped_tokens"] for row in rows] == [2 * TOKENS, 0]
    assert of.ranks.of[SPARE].weights == ["1.0.0", "1.0.1"]


async def test_a_reproducible_minibatch_begins_again_after_a_resize_and_its_tokens_are_counted(tmp_path: Path) -> None:
    async with streaming(tmp_path, actor=REPRODUCIBLE) as of:
        at = await begun(of)
        await until_accumulated(of, 1)
        await at.ask([SECOND], Layout())
        await at.committed()
        await of.bench.changes.until(lambda: len(of.ranks.of[SECOND].accumulated) == 2)
        await of.scored(range(2, 8))
        report = await of.report()
        rows = of.journal()
        progress = [event.progress for event in await of.bench.published("progress", count=3)]
    assert portions(of, SECOND)[:2] == [(0, [0, 1]), (0, [0, 1])]
    assert of.ranks.of[SECOND].weights == ["1.0.0", "1.0.1"]
    assert [row["dropped_tokens"] for row in rows] == [2 * TOKENS, 0]
    assert [each.metrics["dropped_tokens"] for each in progress if each.phase == "train"] == [2 * TOKENS, 0]
    assert report.metrics["dropped_tokens"] == 2 * TOKENS
    assert report.trained == fate_of(ids(*range(8)))
    assert report.num_duplicates_dropped == 0


async def test_a_reproducible_resize_does_not_wait_for_groups_that_are_still_to_come(tmp_path: Path) -> None:
    async with streaming(tmp_path, actor=REPRODUCIBLE) as of:
        at = await begun(of)
        await until_accumulated(of, 1)
        hold(of, holds=True)
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        # What was dropped is not begun any more, so the hold applies to it.
        await of.scored(range(2, 8))
        await of.bench.changes.until(lambda: len(of.watch.prompts("fetch")) == 8)
        assert of.ranks.of[SPARE].num_asked == 0
        hold(of, holds=False)
        await of.report()
        rows = of.journal()
    assert [row["dropped_tokens"] for row in rows] == [2 * TOKENS, 0]
    assert of.ranks.of[SPARE].weights == ["1.0.0", "1.0.1"]


async def test_a_reproducible_resize_waits_for_a_minibatch_whose_groups_are_all_there(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_permits=0, actor=REPRODUCIBLE) as of:
        at = await begun(of)
        await until_asked(at, 1)
        name = await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        # The rest comes while the first portion is trained.
        await of.scored(range(2, 8))
        await of.bench.changes.until(lambda: len(of.watch.prompts("fetch")) == 8)
        permit(at, 1)
        await until_asked(at, 2)
        assert of.ranks.of[FIRST].resharded == [], "the minibatch is being trained"
        permit(at, 1)
        assert (await at.committed()).transition_id == name
        permit(at, 2)
        await of.report()
        rows = of.journal()
    assert portions(of) == [(0, [0, 1])]
    assert [row["dropped_tokens"] for row in rows] == [0, 0]
    assert of.ranks.of[SPARE].weights == ["1.0.0", "1.0.1"]


async def test_a_minibatch_begins_again_at_once_where_its_rest_takes_longer(tmp_path: Path) -> None:
    sizes = {"prompts_per_iteration": 16, "n_minibatches": 2}
    async with streaming(tmp_path, num_permits=0, actor=REPRODUCIBLE, algorithm=sizes) as of:
        at = await begun(of)
        await until_asked(at, 1)
        for _ in range(2):
            of.take().rates.note(Layout(), num_tokens=1, load=1, seconds=1000.0, is_last=False)
        name = await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        # Six groups on two replicas take longer than eight on three.
        await of.scored(range(2, 16))
        await of.bench.changes.until(lambda: len(of.watch.prompts("fetch")) == 16)
        permit(at, 1)
        assert (await at.committed()).transition_id == name
        permit(at, PLENTY)
        await of.report()
        rows = of.journal()
    assert [row["dropped_tokens"] for row in rows] == [2 * TOKENS, 0]
    assert of.ranks.of[SPARE].weights == ["1.0.0", "1.0.1"]


async def test_a_resize_that_fails_drops_the_portions_too(tmp_path: Path) -> None:
    async with streaming(tmp_path, actor=STANDBY) as of:
        at = await begun(of)
        await until_accumulated(of, 1)
        of.ranks.of[SECOND].refuses = "prepare_reshard"
        await at.ask([FIRST], Layout())
        await at.failed()
        await until_accumulated(of, 2)
        await of.scored(range(2, 8))
        await of.report()
        rows = of.journal()
    assert portions(of)[:2] == [(0, [0, 1]), (0, [0, 1])]
    assert [row["dropped_tokens"] for row in rows] == [2 * TOKENS, 0]


async def test_a_minibatch_begins_again_after_a_death_in_a_portion(tmp_path: Path) -> None:
    async with streaming(tmp_path, actor=STANDBY, algorithm={"prompts_per_iteration": 12, "n_minibatches": 2}) as of:
        at = await begun(of)
        await until_accumulated(of, 1)
        of.ranks.of[SECOND].stays_in = "accumulate"
        await of.scored([2, 3])
        await at.dies(SECOND, "accumulate")
        await of.bench.changes.until(lambda: len(of.ranks.of[FIRST].accumulated) == 2)
        await at.replace_dead(SECOND)
        await at.committed()
        await of.scored(range(4, 12))
        report = await of.report()
        rows = of.journal()
    assert [row["dropped_tokens"] for row in rows] == [2 * TOKENS, 0]
    assert report.trained == fate_of(ids(*range(12)))
    assert {tuple(of.ranks.of[gpu].weights) for gpu in (FIRST, SECOND)} == {("1.0.0", "1.0.1")}
