"""A job over two machines (`tests/two_machines.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import RunningJob, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tests.two_machines import Lab, are_possible, link_down, linked, services_there, two_machines
from tidegate.json_text import parse_json
from tidegate.machines import LOST_S

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

ITERATIONS = 12
DRAWS = expected_draws(iterations=ITERATIONS, prompts=8, group_size=4)


@pytest.fixture(scope="module")
def link() -> Iterator[None]:
    if not are_possible():
        pytest.fail("make test-hosts needs root and iproute2's ip: it makes a network namespace")
    with linked():
        yield


@pytest.fixture
def lab(link: None, tmp_path: Path) -> Iterator[Lab]:
    with two_machines(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def want_checksum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same job on one machine."""

    async def on_one_machine() -> str:
        job = small_job("one", algorithm__iterations=ITERATIONS)
        async with running(job, tmp_path_factory.mktemp("one")) as one:
            return str((await one.result())["summary"]["weights_checksum"])

    return asyncio.run(on_one_machine())


async def assert_nothing_was_lost(job: RunningJob, want_checksum: str) -> None:
    summary = (await job.result())["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    assert summary["weights_checksum"] == want_checksum


async def test_a_job_over_two_machines_has_the_weights_of_one(lab: Lab, want_checksum: str) -> None:
    async with running(lab.job("two", algorithm__iterations=ITERATIONS), lab.folder) as job:
        await job.until(generating(1))
        assert services_there()
        await assert_nothing_was_lost(job, want_checksum)
    trace = parse_json((job.folder.root / "latest" / "timeline.json").read_bytes())["otherData"]
    assert trace["clock_error_ns"]["n1"] < 50_000_000
    there = [lengths for gpu, lengths in trace["state_ns"].items() if gpu.startswith("n1/")]
    assert there
    for lengths in there:
        assert {*lengths} > {"free", "starting"}, "spans of a clock that is a day ahead would lie outside"


async def test_a_job_goes_on_when_an_agent_is_killed_and_started_again(lab: Lab, want_checksum: str) -> None:
    async with running(lab.job("killed", algorithm__iterations=ITERATIONS), lab.folder) as job:
        await job.until(updated(3))
        lab.kill_agent()
        lab.start_agent()
        await assert_nothing_was_lost(job, want_checksum)


@pytest.mark.parametrize("seconds", [5, 60])
async def test_a_job_goes_on_after_its_link_was_down(lab: Lab, want_checksum: str, seconds: int) -> None:
    async with running(lab.job(f"down{seconds}", algorithm__iterations=ITERATIONS), lab.folder) as job:
        await job.until(updated(3))
        before = services_there()
        with link_down():
            await asyncio.sleep(seconds)
            # Only a machine that hears nothing for longer ends them.
            assert services_there() == (before if seconds < LOST_S else [])
        await assert_nothing_was_lost(job, want_checksum)


async def test_an_agent_ends_what_runs_there_when_the_job_is_killed_and_it_can_be_resumed(
    lab: Lab, want_checksum: str
) -> None:
    raw = lab.job("gone", algorithm__iterations=ITERATIONS)
    async with running(raw, lab.folder) as job:
        await job.until(updated(1))
        job.process.kill()
        await job.process.wait()
    async with asyncio.timeout(30):
        while services_there():  # noqa: ASYNC110 # the ends of other namespaces' processes are no events here
            await asyncio.sleep(0.1)
    async with running(raw, lab.folder, "--resume") as job:
        await assert_nothing_was_lost(job, want_checksum)
