"""The actor's lead has real workers build layouts ahead: a foreseen switch uses them, with the bits of any other."""

from __future__ import annotations

import asyncio
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.actor.real_workers import PATIENCE_S, real_workers, trained
from tests.unit.actor.actor_bench import FIRST, MOVING, SECOND
from tests.unit.actor.resize_bench import SPARE
from tidegate.timeline import read_spans
from tidegate.types import Layout

pytestmark = pytest.mark.timeout(240)

THIRD = "n0/2"


async def _grown(tmp_path: Path, *, ahead_mib: int = 1024, killed: str = "") -> tuple[bool, str]:
    """Grow from two ranks to four after the first update. `killed`: a worker on standby that is killed before.

    Returns whether the new layout was there before, and the sum of the final weights."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as memory:
        async with real_workers(tmp_path, Path(memory), actor={"layouts_ahead_mib": ahead_mib}, **MOVING) as at:
            await at.start_workers()
            at.of.take(at.of.bench.open_iteration())
            await at.of.scored([0, 1])
            await at.event("progress", which=lambda event: event.progress.phase == "train")
            if killed:
                at.process(killed).kill()
                async with asyncio.timeout(PATIENCE_S):
                    assert (await at.deaths.get()).gpu == killed
            await at.ask([FIRST, SECOND, THIRD, SPARE], Layout(dp=4))
            committed = (await at.event("layout_committed", count=2)).layout_committed
            return committed.reshard.was_built, await trained(at)


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a job that builds nothing ahead."""
    was_built, weights = asyncio.run(_grown(tmp_path_factory.mktemp("cold"), ahead_mib=0))
    assert not was_built
    return weights


@pytest.mark.long
async def test_a_foreseen_switch_uses_what_was_built_ahead(tmp_path: Path, want: str) -> None:
    assert await _grown(tmp_path) == (True, want)
    follows = {
        (before.state, after.state)
        for spans in read_spans(tmp_path / "timeline").values()
        for before, after in pairwise(spans)
    }
    assert ("training", "switching") in follows, "the time of the proof is the switch's"


@pytest.mark.long
async def test_a_worker_that_was_killed_ends_what_was_built_with_it(tmp_path: Path, want: str) -> None:
    assert await _grown(tmp_path, killed=THIRD) == (False, want)
