"""A launcher's last request to a scheduler before it stops it: the iterations reported since the last beat."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cli.views import LinesView, UnfailingStream
from tests.unit.cli.configs import small_config
from tests.unit.cli.schedulers import LeavingScheduler, served
from tidegate.job import JobFolder
from tidegate.launcher.follow import JobFollower
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.runtime.service import connect_bus
from tidegate.v1 import control_pb2


class ReportingScheduler(LeavingScheduler):
    """Reports a job in its second iteration."""

    async def GetJob(self, request: Any, context: Any) -> control_pb2.GetJobResponse:
        return control_pb2.GetJobResponse(job="small", phase="running", iteration=1, incarnation=1)


@pytest.mark.parametrize(("is_there", "want"), [(True, 1), (False, 0)], ids=["a live one", "one that is gone"])
async def test_a_run_that_is_stopped_has_the_schedulers_last_word_if_it_answers(
    is_there: bool, want: int, tmp_path: Path
) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = small_config(tmp_path, servers={"nats_url": servers.nats.url, "redis_url": servers.store.url})
        folder = JobFolder.of(config)
        folder.root.mkdir(parents=True)
        bus = await connect_bus(config, name="test", opens_after=0)
        try:
            async with AsyncExitStack() as serving:
                await serving.enter_async_context(served(folder, ReportingScheduler(folder)))
                if not is_there:
                    await serving.aclose()
                with (tmp_path / "shown").open("w") as shown:
                    follower = JobFollower(bus, config, folder, LinesView(UnfailingStream(shown)))
                    await follower.look_once_more()
        finally:
            await bus.close()
    assert follower.status.iteration == want
