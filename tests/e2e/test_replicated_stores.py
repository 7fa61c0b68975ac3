"""A job on replicated servers: the death of the Redis primary and of the NATS server that leads its streams loses
nothing, and the job comes to the same weights without a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import UPDATES_PER_ITERATION, replicated_job, running
from tests.e2e.lineage import expected_draws, trained_draws
from tests.own_servers import guarded
from tests.replicated import Replicated
from tidegate.adapters import subjects
from tidegate.types import JobId

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)


@pytest.mark.parametrize("has_credentials", [False, True], ids=["open", "with credentials"])
async def test_the_deaths_of_a_primary_and_of_a_leader_of_streams_change_no_weight(
    has_credentials: bool, want_checksum: str, tmp_path: Path
) -> None:
    credentials, guard = guarded("plain", tmp_path) if has_credentials else (None, None)
    async with (
        Replicated(tmp_path / "own-servers", guard=guard) as servers,
        running(replicated_job(servers, credentials), tmp_path) as job,
    ):
        await job.until_trained(1)
        servers.kill("valkey0")
        await job.until_trained(UPDATES_PER_ITERATION + 1)
        servers.kill(await servers.leader_of(subjects.samples_stream(JobId("plain"))))
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == DRAWS
        assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
        assert summary["weights_checksum"] == want_checksum
        assert await servers.term() > 1, "the new primary was adopted under a term of its own"
