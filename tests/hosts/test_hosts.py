"""A job over two machines (`tests/two_machines.py`)."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.jobs import RunningJob, generating, running, updated
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once
from tests.two_machines import Lab, link_down, services_there
from tidegate.json_text import parse_json
from tidegate.machines import LOST_S

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


async def assert_nothing_was_lost(job: RunningJob, want_checksum: str) -> None:
    assert_all_was_trained_once(job.folder.root, (await job.result())["summary"], want_checksum)


async def test_a_job_over_two_machines_has_the_weights_of_one(lab: Lab, want_checksum: str) -> None:
    async with running(lab.job("two", algorithm__iterations=ITERATIONS), lab.jobs) as job:
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
    async with running(lab.job("killed", algorithm__iterations=ITERATIONS), lab.jobs) as job:
        await job.until(updated(3))
        lab.kill_agent()
        lab.start_agent()
        await assert_nothing_was_lost(job, want_checksum)


@pytest.mark.parametrize("seconds", [5, 60])
async def test_a_job_goes_on_after_its_link_was_down(lab: Lab, want_checksum: str, seconds: int) -> None:
    async with running(lab.job(f"down{seconds}", algorithm__iterations=ITERATIONS), lab.jobs) as job:
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
    async with running(raw, lab.jobs) as job:
        await job.until(updated(1))
        job.process.kill()
        await job.process.wait()
    async with asyncio.timeout(30):
        while services_there():  # noqa: ASYNC110 # the ends of other namespaces' processes are no events here
            await asyncio.sleep(0.1)
    async with running(raw, lab.jobs, "--resume") as job:
        await assert_nothing_was_lost(job, want_checksum)
