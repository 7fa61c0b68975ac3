"""The reference of the tests of whole jobs, the same job when nothing happens to it; and a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.cluster_access import agent_pid
from tests.e2e.clusters import Cluster
from tests.e2e.jobs import running, small_job


@pytest.fixture(scope="session")
def want_checksum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of the small job."""

    async def undisturbed() -> dict[str, Any]:
        async with running(small_job("plain"), tmp_path_factory.mktemp("undisturbed")) as job:
            return await job.result()

    checksum: str = asyncio.run(undisturbed())["summary"]["weights_checksum"]
    return checksum


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("cli.cluster_access.CALL_TIMEOUT_S", 60.0)  # the machine may be busy for seconds
    found = Cluster(tmp_path, capsys)
    yield found
    if agent_pid(found.folder) is not None:
        found.run("down")
