"""What a scheduler knows of its job while the store is not open."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.shell.bus_state import told_by_bus
from tests.component_bench import JOB
from tests.unit.scheduler.wire_cluster import running, wire_cluster


@pytest.mark.parametrize("drops", [False, True], ids=["all events", "a copy and what follows"])
async def test_the_bus_alone_tells_the_instances_and_where_they_are(tmp_path: Path, drops: bool) -> None:
    async with wire_cluster(tmp_path) as of:
        await of.boot()
        await of.submit()
        async with running(await of.replica()):
            await of.changes.until(lambda: len(of.written_state().summaries) >= 1)
        written = of.written_state()
        if drops:
            await of.bus.copies.drop_events(JOB, until=written.applied_seq)
        of.server.lose_data()
        told = await told_by_bus(of.bus.events, of.bus.copies, JOB)
    assert told.applied_seq >= written.applied_seq
    assert {name: each.endpoint for name, each in told.instances.items()} == {
        name: f"at-{name}" for name in written.instances
    }


async def test_a_job_without_events_has_no_instances(tmp_path: Path) -> None:
    async with wire_cluster(tmp_path) as of:
        assert not (await told_by_bus(of.bus.events, of.bus.copies, JOB)).instances
