"""A job on replicated servers, of which the one that leads is cut off from the others. Clients still reach them all, so
the job may go on talking to the one that leads no more: nothing that it takes may count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.jobs import UPDATES_PER_ITERATION, replicated_job, running
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once
from tests.partitions import MACHINES, cut_off, switched
from tests.replicated import Replicated, until
from tests.two_machines import are_possible
from tidegate.adapters import subjects
from tidegate.types import JobId

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

MORE = 3 * UPDATES_PER_ITERATION
"""More updates than the iteration under way has, so that they take new messages."""
SAMPLES = subjects.samples_stream(JobId("plain"))


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Replicated]:
    if not are_possible():
        pytest.fail("make test-hosts needs root and iproute2's ip: it makes network namespaces")
    with switched():
        async with Replicated(tmp_path / "own-servers", machines=MACHINES) as started:
            yield started


async def test_a_primary_that_is_cut_off_takes_no_write_that_counts(
    servers: Replicated, want_checksum: str, tmp_path: Path
) -> None:
    async with running(replicated_job(servers, algorithm__iterations=ITERATIONS), tmp_path) as job:
        await job.until_trained(UPDATES_PER_ITERATION + 1)
        assert await servers.term() == 1

        async def is_over() -> bool:
            return await servers.primary() != "valkey0"

        with cut_off("valkey0"):
            await until(is_over)
            assert (await servers.history("valkey0"))[0] == "master", "both sides have a primary"
            await job.until_trained(job.num_trained() + MORE)
            assert (await servers.history("valkey0"))[0] == "master", "both sides have a primary"
            assert await servers.term() == 2, "the new primary was adopted under a term of its own"
        await servers.until_replica("valkey0")
        assert_all_was_trained_once(job.folder.root, (await job.result())["summary"], want_checksum)


async def test_a_leader_of_streams_that_is_cut_off_takes_no_message_that_counts(
    servers: Replicated, want_checksum: str, tmp_path: Path
) -> None:
    async with running(replicated_job(servers, algorithm__iterations=ITERATIONS), tmp_path) as job:
        await job.until_trained(UPDATES_PER_ITERATION + 1)
        leader = await servers.leader_of(SAMPLES)
        other = next(name for name in ("nats0", "nats1") if name != leader)
        with cut_off(leader):
            await job.until_trained(job.num_trained() + MORE)
            assert (await servers.cluster_of(SAMPLES, asked=other)).leader not in (None, leader)
        assert_all_was_trained_once(job.folder.root, (await job.result())["summary"], want_checksum)

        async def has_caught_up() -> bool:
            info = await servers.cluster_of(SAMPLES)
            return info.leader != leader and any(
                each.name == leader and each.current and not each.lag for each in info.replicas or []
            )

        await until(has_caught_up)
