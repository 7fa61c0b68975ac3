"""What a launcher tells the job's stream before anyone works: the checkpoint it found, then that the job shall run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.configs import small_config
from tidegate.cli.views import LinesView, UnfailingStream
from tidegate.events import EventSource
from tidegate.job import JobFolder
from tidegate.launcher.checkpoint import FoundCheckpoint
from tidegate.launcher.follow import JobFollower
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.runtime.service import connected_bus
from tidegate.types import JobId
from tidegate.v1 import events_pb2

FOUND = FoundCheckpoint("inc007-it000002", incarnation=7, next_iteration=2, version=2, num_samples_trained=8)


@pytest.mark.parametrize(
    ("told_before", "want"), [([], 8), ([3], 8), ([12], 13)], ids=["an empty stream", "an older one", "a newer one"]
)
async def test_a_resumed_job_has_an_incarnation_above_its_streams_and_above_its_checkpoints(
    told_before: list[int], want: int, tmp_path: Path
) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = small_config(tmp_path, servers={"nats_url": servers.nats.url, "redis_url": servers.store.url})
        bus = await connected_bus(config, name="test")
        try:
            source = EventSource("launcher", role=None, boot=1, now_ns=lambda: 1)
            for incarnation in told_before:
                earlier = events_pb2.JobSubmitted(config_json="{}")
                await bus.events.publish(source.event(earlier, job=JobId(config.job), incarnation=incarnation))
            with (tmp_path / "shown").open("w") as shown:
                view = LinesView(UnfailingStream(shown))
                follower = JobFollower(bus, config, JobFolder.of(config), view)
                await follower.submit(source, resume=True, checkpoint=FOUND)
            told = [event async for _, event in bus.events.read(JobId(config.job))][len(told_before) :]
        finally:
            await bus.close()
    saved, submitted = told
    assert saved.checkpoint_saved == events_pb2.CheckpointSaved(
        name="inc007-it000002", next_iteration=2, version=2, num_samples_trained=8
    )
    assert submitted.job_submitted.resume
    assert [event.incarnation for event in told] == [want, want]
