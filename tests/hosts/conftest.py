"""The two machines of these tests, and the weights that a job has to have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import running, small_job
from tests.hosts.trained import ITERATIONS
from tests.two_machines import Lab, are_possible, linked, two_machines


@pytest.fixture(scope="session")
def link() -> Iterator[None]:
    if not are_possible():
        pytest.fail("make test-hosts needs root and iproute2's ip: it makes a network namespace")
    with linked():
        yield


@pytest.fixture
def lab(link: None, tmp_path: Path) -> Iterator[Lab]:
    with two_machines(tmp_path) as found:
        yield found


@pytest.fixture(scope="session")
def want_checksum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same job on one machine."""

    async def on_one_machine() -> str:
        job = small_job("one", algorithm__iterations=ITERATIONS)
        async with running(job, tmp_path_factory.mktemp("one")) as one:
            return str((await one.result())["summary"]["weights_checksum"])

    return asyncio.run(on_one_machine())
