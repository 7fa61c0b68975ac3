"""Stores that go away under a job, or come back with less: the job goes on, or stops and resumes at the first try."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import JOB as SOAK
from benchmarks.soak import Sizes
from benchmarks.soak import config as soak_config
from tests.e2e.jobs import RunningJob, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.runtime.embedded import EmbeddedServer, EmbeddedServers
from tidegate.runtime.service import connect_bus

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)
AWAY_S = 6.0
"""Twice the jobs' lease: every instance and every lead is taken for dead meanwhile."""


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[EmbeddedServers]:
    async with EmbeddedServers(tmp_path / "own-servers") as started:
        yield started


def _job(servers: EmbeddedServers, **changes: Any) -> dict[str, Any]:
    return small_job("plain", servers={"nats_url": servers.nats.url, "redis_url": servers.store.url}, **changes)


async def _kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await server.exited()


async def _lose(servers: EmbeddedServers, folder: Path, *names: str) -> None:
    """Kill these servers and start them on the same ports without their data."""
    for name in names:
        await _kill({"nats": servers.nats, "valkey": servers.store}[name])
        shutil.rmtree(folder / "own-servers" / name)
    await servers.start()


def _reported(iteration: int) -> Callable[[Any], bool]:
    return lambda event: event.WhichOneof("body") == "iteration_reported" and event.iteration >= iteration


async def _assert_finished(job: RunningJob) -> dict[str, Any]:
    summary: dict[str, Any] = (await job.result())["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"]) == (0, 0)
    assert summary["samples_trained"] == sum(DRAWS.values())
    return summary


async def _stopped(job: RunningJob) -> str:
    """What the run said, once it has been interrupted."""
    job.process.send_signal(signal.SIGINT)
    assert await job.process.wait() == 128 + signal.SIGINT
    assert job.process.stderr is not None
    return (await job.process.stderr.read()).decode()


async def test_a_job_goes_on_after_redis_was_away_for_longer_than_all_leases(
    servers: EmbeddedServers, tmp_path: Path
) -> None:
    async with running(_job(servers), tmp_path) as job:
        await job.until(generating(1))
        await _kill(servers.store)
        # Leases end by time alone.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job.process.wait(), AWAY_S)
        await servers.start()
        await _assert_finished(job)


@pytest.mark.parametrize("moment", [generating(1), updated(1)], ids=["generating", "between two updates"])
async def test_a_job_goes_on_after_redis_came_back_empty(
    servers: EmbeddedServers, tmp_path: Path, moment: Callable[[Any], bool]
) -> None:
    async with running(_job(servers), tmp_path) as job:
        await job.until(moment)
        await _lose(servers, tmp_path, "valkey")
        await _assert_finished(job)


async def test_a_job_goes_on_from_the_copy_of_its_state_where_older_events_are_dropped_and_redis_came_back_empty(
    servers: EmbeddedServers, tmp_path: Path
) -> None:
    sizes = Sizes(iterations=250, early=0, window=0)
    raw = soak_config(tmp_path, sizes) | {"servers": {"nats_url": servers.nats.url, "redis_url": servers.store.url}}
    async with running(raw, tmp_path) as job:
        await job.until(_reported(100))
        bus = await connect_bus(job.config, name="test")
        for iteration in range(101, sizes.iterations):
            await job.until(_reported(iteration))
            first = await anext(aiter(bus.events.read(SOAK)))
            if first[0] > 1:
                break
        await bus.close()
        assert first[0] > 1, "no event was dropped"
        await _lose(servers, tmp_path, "valkey")
        summary = (await job.result())["summary"]
    assert (summary["iterations"], summary["lost"], summary["duplicates"]) == (sizes.iterations, 0, 0)
    assert trained_draws(job.folder.journal) == expected_draws(iterations=sizes.iterations, prompts=2, group_size=2)


async def test_a_job_whose_nats_came_back_empty_says_so_and_resumes_at_the_first_try(
    servers: EmbeddedServers, tmp_path: Path
) -> None:
    async with running(_job(servers), tmp_path) as job:
        await job.until(generating(1))
        await _lose(servers, tmp_path, "nats")
        assert job.process.stderr is not None
        said = (await job.process.stderr.read()).decode()
        assert await job.process.wait() == 1
    assert "NATS has lost the job's streams, so everything was stopped" in said
    assert "Traceback" not in said
    async with running(_job(servers), tmp_path, "--resume") as job:
        await _assert_finished(job)


async def test_a_job_whose_nats_came_back_with_older_data_says_so_and_resumes_at_the_first_try(
    servers: EmbeddedServers, tmp_path: Path
) -> None:
    data, older = tmp_path / "own-servers" / "nats", tmp_path / "older"
    async with running(_job(servers), tmp_path) as job:
        await job.until(generating(1))
        await _kill(servers.nats)
        shutil.copytree(data, older)
        await servers.start()
        await job.until(generating(2))
        await _kill(servers.nats)
        shutil.rmtree(data)
        shutil.copytree(older, data)
        await servers.start()
        assert job.process.stderr is not None
        said = (await job.process.stderr.read()).decode()
        assert await job.process.wait() == 1
    assert "NATS came back with older data" in said
    assert "--resume" in said
    async with running(_job(servers), tmp_path, "--resume") as job:
        await _assert_finished(job)


@pytest.mark.parametrize("lost", [("valkey",), ("nats",), ("nats", "valkey")], ids=["Redis", "NATS", "both"])
@pytest.mark.parametrize("num_resumes", [0, 1], ids=["before the first resume", "after a resume"])
async def test_a_job_whose_stores_were_lost_while_it_was_stopped_resumes_at_the_first_try(
    servers: EmbeddedServers, tmp_path: Path, lost: tuple[str, ...], num_resumes: int
) -> None:
    options: list[str] = []
    for iteration in range(1, num_resumes + 2):
        async with running(_job(servers), tmp_path, *options) as job:
            await job.until(generating(iteration))
            await _stopped(job)
        options = ["--resume"]
    await _lose(servers, tmp_path, *lost)
    async with running(_job(servers), tmp_path, "--resume") as job:
        await _assert_finished(job)
        assert [event.failed.message for event in job.events if event.HasField("failed")] == []


async def test_a_job_whose_newest_checkpoint_is_damaged_resumes_from_the_one_before(tmp_path: Path) -> None:
    async with running(small_job("damaged", checkpoint__keep=2), tmp_path) as job:
        await job.until(generating(2))
        await _stopped(job)
        newest, _ = sorted(job.folder.checkpoints.glob("inc*"), reverse=True)
        file = min(newest.glob("rank*"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    async with running(small_job("damaged", checkpoint__keep=2), tmp_path, "--resume") as job:
        await _assert_finished(job)
        committed = [event.layout_committed for event in job.events if event.HasField("layout_committed")]
    assert 1 in [each.next_iteration for each in committed]
    assert newest.with_name(f"{newest.name}.damaged").exists()
