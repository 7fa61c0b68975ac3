"""A job on replicated servers, of which the one that leads has no room left on its disk. The job goes on with the other
ones. Once the server has room and was restarted, it catches up with them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import nats.errors
import pytest

from tests.e2e.jobs import UPDATES_PER_ITERATION, replicated_job, running
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once
from tests.replicated import Replicated, until
from tidegate.adapters import subjects
from tidegate.types import JobId

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

DISK = "96m"
EVENTS = subjects.events_stream(JobId("plain"))


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Replicated]:
    if os.geteuid():
        pytest.fail("make test-hosts needs root: it mounts disks")
    with ExitStack() as mounted:

        def mount(folder: Path) -> None:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
            mounted.callback(lambda: subprocess.run(["umount", folder], check=True))

        async with Replicated(tmp_path / "own-servers", disk=mount) as started:
            yield started


def fill(disk: Path) -> Path:
    """The file that has the rest of the disk."""
    size = 1 << 20
    with (disk / "other").open("wb", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return disk / "other"


async def test_a_primary_whose_disk_is_full_is_replaced(
    servers: Replicated, want_checksum: str, tmp_path: Path
) -> None:
    async with running(replicated_job(servers, algorithm__iterations=ITERATIONS), tmp_path) as job:
        await job.until_trained(UPDATES_PER_ITERATION + 1)
        other = fill(servers.folder_of("valkey0"))

        async def is_replaced() -> bool:
            return await servers.primary() != "valkey0"

        await until(is_replaced)
        other.unlink()
        servers.kill("valkey0")
        servers.start("valkey0")
        await servers.until_replica("valkey0")
        assert_all_was_trained_once(job.folder.root, (await job.result())["summary"], want_checksum)
        assert await servers.term() > 1


async def test_a_leader_of_streams_whose_disk_is_full_is_replaced(
    servers: Replicated, want_checksum: str, tmp_path: Path
) -> None:
    async with running(replicated_job(servers, algorithm__iterations=ITERATIONS), tmp_path) as job:
        await job.until_trained(UPDATES_PER_ITERATION + 1)
        full = await servers.leader_of(EVENTS)
        other = fill(servers.folder_of(full))

        async def is_replaced() -> bool:
            with suppress(nats.errors.Error):  # nobody leads now
                return await servers.leader_of(EVENTS) not in ("None", full)
            return False

        await until(is_replaced)
        other.unlink()
        servers.kill(full)
        servers.start(full)
        assert_all_was_trained_once(job.folder.root, (await job.result())["summary"], want_checksum)

        async def has_caught_up() -> bool:
            with suppress(nats.errors.Error):
                info = await servers.cluster_of(EVENTS)
                return any(each.name == full and each.current and not each.lag for each in info.replicas or [])
            return False

        await until(has_caught_up)
