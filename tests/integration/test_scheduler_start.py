"""The scheduler's process whose store is not there yet."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.component_bench import job_config
from tests.ports import kept_port
from tests.scheduler_process import scheduler_process
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.runtime.embedded import EmbeddedServers

LOOK_EVERY_S = 0.02
PATIENCE_S = 60.0
"""A process that starts on a busy machine."""


def config_with(servers: EmbeddedServers, folder: Path) -> JobConfig:
    return job_config(folder, servers={"nats_url": servers.nats.url, "redis_url": servers.store.url})


def logged(config: JobConfig) -> str:
    path = JobFolder.of(config).attempt().logs / "scheduler.jsonl"
    return path.read_text() if path.exists() else ""


async def test_a_scheduler_that_starts_before_its_store_waits_for_it_and_serves(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = config_with(servers, tmp_path)
        await servers.store.stop()
        async with AsyncExitStack() as running:
            running.enter_context(kept_port(servers.store.port))
            process = await running.enter_async_context(scheduler_process(config))
            await running.enter_async_context(asyncio.timeout(PATIENCE_S))
            while "store not open yet: asking again" not in logged(config):
                assert process.returncode is None
                await asyncio.sleep(LOOK_EVERY_S)
            await servers.start()
            while not JobFolder.of(config).endpoint.exists():
                assert process.returncode is None, logged(config)
                await asyncio.sleep(LOOK_EVERY_S)
        assert process.returncode == 0
        assert "nats_disconnected" not in logged(config), "it ended on purpose"


@pytest.mark.long
async def test_a_scheduler_whose_store_never_comes_ends_and_has_said_why(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = config_with(servers, tmp_path)
        await servers.store.stop()
        async with scheduler_process(config) as process, asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 1
        assert "cannot start without the store" in logged(config)
        assert f"the store at 127.0.0.1:{servers.store.port} did not answer" in logged(config)
