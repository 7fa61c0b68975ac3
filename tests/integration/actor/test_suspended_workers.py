"""The actor's lead suspends real workers of its instances, and resumes them on other slots in another layout."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from tests.integration.actor.real_workers import PATIENCE_S, real_workers, trained
from tests.unit.actor.actor_bench import FIRST, SECOND
from tests.unit.actor.resize_bench import SPARE
from tidegate.codec import decode_grants, decode_layout
from tidegate.types import Layout

pytestmark = pytest.mark.timeout(240)


async def _never_suspended(tmp_path: Path, memory: Path) -> str:
    async with real_workers(tmp_path, memory) as at:
        await at.start_workers()
        at.of.take(at.of.bench.open_iteration())
        return await trained(at)


async def test_suspended_workers_free_their_gpus_and_train_on_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as shared:
        memory = Path(shared)
        for name in ("fixed", "suspended"):
            (tmp_path / name).mkdir()
        want = await _never_suspended(tmp_path / "fixed", memory / "fixed")
        async with real_workers(tmp_path / "suspended", memory / "suspended") as at:
            await at.start_workers()
            at.of.take(at.of.bench.open_iteration())
            await at.of.scored([0, 1])
            await at.event("progress", which=lambda event: event.progress.phase == "train")
            processes = [at.process(gpu) for gpu in (FIRST, SECOND)]
            name = await at.ask_suspension()
            released = (await at.event("gpus_released")).gpus_released
            assert {grant.gpu for grant in decode_grants(released.grants)} == {FIRST, SECOND}
            assert released.held_bytes > 0, "processes that stand by take memory, and it is measured"
            assert [at.is_held(gpu) for gpu in (FIRST, SECOND)] == [False, False]
            await at.free(name, released)
            # One keeper dies: its part of the state is in its node's memory.
            processes[1].kill()
            async with asyncio.timeout(PATIENCE_S):
                assert (await at.deaths.get()).gpu == SECOND
            await at.ask_resumption([SPARE, FIRST], Layout(pp=2))
            committed = (await at.event("layout_committed", count=2)).layout_committed
            assert decode_layout(committed.layout) == Layout(pp=2)
            assert committed.num_dead == 1
            assert committed.reshard.num_updates == 1
            assert at.process(FIRST).pid == processes[0].pid, "no process starts for it"
            assert [at.is_held(gpu) for gpu in (SPARE, FIRST, SECOND)] == [True, True, False]
            assert await trained(at) == want
