"""The actor's lead has its fake ranks build layouts ahead while it waits, and not otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.component_bench import NODES
from tests.unit.actor.actor_bench import FIRST, SECOND, Training, ids, training
from tests.unit.actor.resize_bench import SPARE, ResizeBench
from tests.unit.actor.suspend_bench import HOME, SuspendBench
from tidegate.codec import decode_layout, fate_of
from tidegate.types import Layout
from tidegate.v1 import workers_pb2 as wire

MOVING: dict[str, Any] = {
    "scheduler": {"policy": "tide"},
    "cluster": {
        "nodes": {"n0": 3, "n1": 1},
        "component_placement": {"actor": "0-1", "rollout": "2", "inference": "3"},
    },
    "inference": {"layout": {}},
}
"""The actor may get all four slots, the last one is SPARE."""


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


async def test_all_workers_build_what_the_policy_may_ask_for_before_the_first_version(tmp_path: Path) -> None:
    async with moving(tmp_path) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        assert {gpu: places(of, gpu) for gpu in of.ranks.of} == dict.fromkeys((FIRST, SECOND, "n0/2", SPARE), NEXT)
        assert [built.keeps_memory for built in of.ranks.of[FIRST].built] == [True] * 4


async def test_nothing_is_built_for_a_policy_that_moves_no_gpu_or_without_memory(tmp_path: Path) -> None:
    for name, changes in {
        "static": {"scheduler": {"policy": "static"}},
        "no memory": {"actor": {"layouts_ahead_mib": 0}},
    }.items():
        async with moving(tmp_path / name, **changes) as of:
            of.start()
            await of.scored(range(4))
            await of.report()
            assert places(of) == []


async def test_after_a_switch_what_is_near_the_new_layout_is_built_while_the_actor_waits_for_groups(
    tmp_path: Path,
) -> None:
    async with moving(tmp_path) as of:
        at = ResizeBench(of)
        await at.start()
        await of.bench.published("weights_published")
        await at.ask([FIRST, SECOND, SPARE], Layout(dp=3))
        await at.committed()
        of.take(of.bench.open_iteration())
        await until_built(of, 8)
        # The memory of those that were built is back, and the member in the middle may be another.
        assert places(of)[4:] == [
            (Layout(dp=2), [0, 1]),
            (Layout(dp=2), [0, 1]),
        ]
