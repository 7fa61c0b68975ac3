"""The actor's lead has its fake ranks build layouts ahead while it waits, and not otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.component_bench import NODES
from tests.unit.actor.actor_bench import FIRST, MOVING, SECOND, Training, ids, training
from tests.unit.actor.resize_bench import SPARE, ResizeBench
from tests.unit.actor.suspend_bench import HOME, SuspendBench
from tidegate.codec import decode_layout, fate_of
from tidegate.types import Layout


@asynccontextmanager
async def moving(tmp_path: Path, **changes: Any) -> AsyncIterator[Training]:
    async with training(tmp_path, **{**MOVING, **changes}) as of:
        yield of


def places(of: Training, gpu: str = FIRST) -> list[tuple[Layout, list[int]]]:
    """The layouts that this rank built ahead, in order, with the members' ids."""
    return [(decode_layout(built.layout), list(built.ranks)) for built in of.ranks.of[gpu].built]


async def until_built(of: Training, count: int) -> None:
    """Wait until all workers have built so many layouts ahead."""
    await of.bench.changes.until(lambda: all(len(rank.built) == count for rank in of.ranks.of.values()))


NEXT = [(Layout(dp=3), [0, 1, 2]), (Layout(), [0]), (Layout(dp=4), [0, 1, 2, 3]), (Layout(dp=3), [0, 1, 3])]
"""From home on the first two slots. Minibatches have four samples: at most four copies."""
NEXT_OF_THREE = [(Layout(dp=2), [0, 1]), (Layout(dp=4), [0, 1, 3, 2]), (Layout(), [0])]
"""From the first two slots and SPARE. The first one is built already, but its memory may be given back."""


async def _resized(of: Training) -> ResizeBench:
    """A job with an actor on three slots, of which what is next is not built yet."""
    at = ResizeBench(of)
    await at.start()
    await of.bench.published("weights_published")
    assert places(of) == NEXT
    name = await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
    await at.committed()
    await at.close(name)
    at.grants, at.layout = at.members_after, Layout(dp=3)
    for rank in of.ranks.of.values():
        rank.built.clear()
    return at


async def test_all_workers_build_what_the_policy_may_ask_for_before_the_first_version(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        assert {gpu: places(of, gpu) for gpu in of.ranks.of} == dict.fromkeys((FIRST, SECOND, "n0/2", SPARE), NEXT)
        assert [built.keeps_memory for built in of.ranks.of[FIRST].built] == [True] * 4


async def test_nothing_is_built_for_a_policy_that_moves_no_gpu_or_without_memory(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "static": {"scheduler": {"policy": "static"}},
        "no memory": {"actor": {"layouts_ahead_mib": 0}},
    }
    for name, changes in cases.items():
        async with moving(tmp_path / name, **changes) as of:
            of.start()
            await of.scored(range(4))
            await of.report()
            assert places(of) == []


async def test_after_a_switch_what_is_near_is_built_while_the_actor_waits_for_groups(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        await _resized(of)
        of.take(of.bench.open_iteration())
        await until_built(of, 3)
        assert places(of) == places(of, "n0/2") == NEXT_OF_THREE
        await of.scored(range(4))
        assert (await of.report()).trained == fate_of(ids(0, 1, 2, 3))


async def test_nothing_is_built_within_a_minibatch(tmp_path: Path) -> None:
    sizes = {"prompts_per_iteration": 8, "n_minibatches": 2}
    async with moving(tmp_path, algorithm=sizes, actor={"micro_batch_size": 2}) as of:
        await _resized(of)
        await of.scored([0, 1, 2])
        of.take(of.bench.open_iteration())
        await of.bench.changes.until(lambda: bool(of.ranks.of[FIRST].accumulated))
        num_built = len(places(of))
        assert num_built < len(NEXT_OF_THREE)
        # It waits for the fourth group of its minibatch now, and then for the fifth.
        await of.scored([3])
        await of.bench.changes.until(lambda: bool(of.ranks.of[FIRST].trained))
        assert len(places(of)) == num_built
        await until_built(of, len(NEXT_OF_THREE))
        await of.scored(range(4, 8))
        assert (await of.report()).trained == fate_of(ids(*range(8)))


async def test_what_was_built_is_built_again_after_a_death(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        at = await _resized(of)
        of.bench.instances[NODES[0]].kill("n0/2")
        of.take(of.bench.open_iteration())
        await of.scored(range(4))
        await of.report()
        assert places(of) == [], "a worker of the epoch is dead"
        # The first resize makes an epoch without the dead one, whose slot then gets another; the second has that too.
        for nth, (gpus, layout) in enumerate((([FIRST, SECOND], Layout(dp=2)), ([FIRST], Layout())), start=3):
            name = await at.ask(gpus, layout)
            await at.committed(nth=nth)
            await at.close(name)
            at.grants, at.layout = at.members_after, layout
        of.close()
        await of.bench.published("weights_published", count=2)
        of.take(of.bench.open_iteration(iteration=1, version=1))
        await of.bench.changes.until(lambda: len(places(of)) >= 2)
        assert [list(world.members) for world in of.ranks.of[FIRST].worlds] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3, 4]]
        assert places(of)[:2] == [(Layout(dp=2), [0, 1]), (Layout(dp=3), [0, 1, 4])]


async def test_a_standby_that_is_lost_in_a_build_costs_the_epoch_and_no_update(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        at = await _resized(of)
        of.ranks.of["n0/2"].stays_in = "build_ahead"
        of.take(of.bench.open_iteration())
        await at.dies("n0/2", "build_ahead")
        await of.scored(range(4))
        assert (await of.report()).trained == fate_of(ids(0, 1, 2, 3))
        assert len(places(of)) == 1
        assert len(of.ranks.of[FIRST].worlds) == 1
        await at.ask([FIRST, SECOND], Layout(dp=2))
        await at.committed(nth=3)
        assert len(of.ranks.of[FIRST].worlds) == 2
        assert "failed" not in await of.bench.kinds()


async def test_a_build_that_a_worker_refuses_is_not_tried_again_in_its_epoch(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        await _resized(of)
        of.ranks.of[SPARE].refuses = "build_ahead"
        of.take(of.bench.open_iteration())
        await of.bench.changes.until(lambda: of.ranks.of[SPARE].num_refused == 1)
        of.ranks.of[SPARE].refuses = ""
        await of.scored(range(4))
        assert (await of.report()).trained == fate_of(ids(0, 1, 2, 3))
        assert len(places(of)) == 1


async def test_a_layout_that_cannot_be_built_does_not_stop_the_others(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        of.ranks.builds, of.ranks.reason = False, "no room"
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        assert places(of) == NEXT


async def test_the_layouts_of_a_resumption_are_built_while_the_actor_is_suspended(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        at = SuspendBench(of)
        await at.start()
        await of.bench.published("weights_published")
        await at.suspended()
        for rank in of.ranks.of.values():
            rank.built.clear()
        of.take(of.bench.open_iteration())
        await until_built(of, 10)
        assert places(of)[:4] == [
            (Layout(dp=2), [0, 1]),
            (Layout(dp=3), [0, 1, 2]),
            (Layout(), [0]),
            (Layout(dp=4), [0, 1, 2, 3]),
        ]
        await at.ask_resumption(HOME, Layout(dp=2))
        await at.committed()
        await of.scored(range(4))
        assert (await of.report()).trained == fate_of(ids(0, 1, 2, 3))
