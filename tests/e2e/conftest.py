"""The reference of the tests of whole jobs: the same job when nothing happens to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.jobs import running, small_job


@pytest.fixture(scope="session")
def want_checksum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of the small job."""

    async def undisturbed() -> dict[str, Any]:
        async with running(small_job("plain"), tmp_path_factory.mktemp("undisturbed")) as job:
            return await job.result()

    checksum: str = asyncio.run(undisturbed())["summary"]["weights_checksum"]
    return checksum
