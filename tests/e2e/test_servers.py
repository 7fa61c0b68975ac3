"""A job on a user's own servers: it goes on when they restart under it, and comes to the same weights."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.jobs import Condition, RunningJob, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tests.own_servers import guarded
from tidegate.launcher.claim import host_memory_folder
from tidegate.runtime.embedded import EmbeddedServer, EmbeddedServers

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[EmbeddedServers]:
    async with EmbeddedServers(tmp_path / "own-servers") as started:
        yield started


def _urls(servers: EmbeddedServers) -> dict[str, str]:
    return {"nats_url": servers.nats.url, "redis_url": servers.store.url}


async def _assert_as_on_embedded_servers(job: RunningJob, want_checksum: str) -> None:
    summary = (await job.result())["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    assert summary["weights_checksum"] == want_checksum


async def _restart(servers: EmbeddedServers, server: EmbeddedServer, number: signal.Signals) -> None:
    """Restarts the server on the same port, with its former data."""
    os.kill(server.pid, number)
    await server.exited()
    await servers.start()


async def test_a_job_on_servers_given_by_url_starts_none_and_leaves_them_running(
    servers: EmbeddedServers, want_checksum: str, tmp_path: Path
) -> None:
    async with running(small_job("plain", servers=_urls(servers)), tmp_path) as job:
        await job.until(generating(0))
        assert not [process for process in job.processes() if process.name().startswith(("nats-", "valkey"))]
        await _assert_as_on_embedded_servers(job, want_checksum)
        assert not job.folder.servers.exists()
        assert not host_memory_folder(job.config).exists()
    assert servers.nats.is_running
    assert servers.store.is_running


async def test_a_job_shows_servers_of_ones_own_the_credentials_of_their_cluster(
    want_checksum: str, tmp_path: Path
) -> None:
    credentials, guard = guarded("plain", tmp_path)
    async with EmbeddedServers(tmp_path / "own-servers", guard=guard) as servers:
        section = _urls(servers) | {"nats_credentials": str(credentials), "redis_credentials": str(credentials)}
        async with running(small_job("plain", servers=section), tmp_path) as job:
            await _assert_as_on_embedded_servers(job, want_checksum)


RESTARTS: dict[str, tuple[str, signal.Signals, Condition]] = {
    "NATS stopped in order, generating": ("nats", signal.SIGTERM, generating(1)),
    "NATS killed, between two updates": ("nats", signal.SIGKILL, updated(1)),
    "Redis stopped in order, generating": ("store", signal.SIGTERM, generating(1)),
    "Redis killed, between two updates": ("store", signal.SIGKILL, updated(1)),
}


@pytest.mark.parametrize("case", RESTARTS)
async def test_a_job_goes_on_after_a_restart_of_a_server(
    case: str, servers: EmbeddedServers, want_checksum: str, tmp_path: Path
) -> None:
    name, number, when = RESTARTS[case]
    async with running(small_job("plain", servers=_urls(servers)), tmp_path) as job:
        await job.until(when)
        await _restart(servers, {"nats": servers.nats, "store": servers.store}[name], number)
        await _assert_as_on_embedded_servers(job, want_checksum)
