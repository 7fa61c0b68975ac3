"""A job that was stopped, and one that has finished, go on with more iterations, on other GPUs and in other layouts."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest

from cli.prune import prune
from tests.e2e.jobs import REPOSITORY, RunningJob, generating, running, small_job
from tests.e2e.lineage import expected_draws, trained_draws

REPRODUCIBLE = {
    "cluster__nodes": {"n0": 4},
    "cluster__component_placement": {"actor": "0-1", "rollout": "2", "inference": "3"},
    "actor__layout": {"dp": 2},
    "actor__lr_schedule": {},
    "actor__num_logical_shards": 4,
}
ELSEWHERE = {
    "cluster__nodes": {"n0": 2, "n1": 4},
    "cluster__component_placement": {"actor": "2-5", "rollout": "0", "inference": "1"},
    "actor__layout": {"pp": 2, "dp": 2},
}


async def described(job: RunningJob) -> str:
    """What `tidegate describe` prints of the ended job."""
    asked = (sys.executable, "-m", "cli", "describe", job.config.job, "--output-dir", job.config.output_dir)
    process = await asyncio.create_subprocess_exec(*asked, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    return printed.decode()


async def said_by(job: RunningJob) -> str:
    assert job.process.stderr is not None
    return (await job.process.stderr.read()).decode()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_job_goes_on_elsewhere_and_for_longer_with_the_weights_of_a_run_that_nothing_happened_to(
    tmp_path: Path,
) -> None:
    (whole := tmp_path / "whole").mkdir()
    async with running(small_job("longer", **REPRODUCIBLE, algorithm__iterations=4), whole) as job:
        want = (await job.result())["summary"]

    async with running(small_job("longer", **REPRODUCIBLE, algorithm__iterations=2), tmp_path) as job:
        await job.until(generating(1))
        job.process.send_signal(signal.SIGINT)
        assert await job.process.wait() == 128 + signal.SIGINT
        shown = await described(job)
    assert "job longer: interrupted" in shown
    assert "n0/" not in shown, "an interrupted job has no GPU"

    elsewhere = REPRODUCIBLE | ELSEWHERE
    async with running(small_job("longer", **elsewhere, algorithm__iterations=3), tmp_path, "--resume") as job:
        said = await said_by(job)
        assert await job.process.wait() == 0, said
    # The second iteration may end before the signal comes.
    assert re.search("resumes from checkpoint inc001-it00000[12]", said)
    assert "restart" not in said

    # The job has finished. It goes on for one more iteration, on the first GPUs.
    async with running(small_job("longer", **REPRODUCIBLE, algorithm__iterations=4), tmp_path, "--resume") as job:
        found = (await job.result())["summary"]
        draws = trained_draws(job.folder.journal)

    assert draws == expected_draws(iterations=4, prompts=8, group_size=4)
    assert (found["iterations"], found["lost"], found["duplicates"]) == (4, 0, 0)
    assert found["weights_checksum"] == want["weights_checksum"]


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_finished_job_whose_store_was_pruned_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    async with running(small_job("pruned", actor__lr_schedule={}, algorithm__iterations=1), tmp_path) as job:
        said = await said_by(job)
        assert await job.process.wait() == 0, said
    assert prune(job.folder, with_resumable=False, remove=True) is not None
    assert not job.folder.servers.exists()

    async with running(
        small_job("pruned", actor__lr_schedule={}, algorithm__iterations=2), tmp_path, "--resume"
    ) as job:
        said = await said_by(job)
        assert await job.process.wait() == 0, said
        summary = (await job.result())["summary"]
        draws = trained_draws(job.folder.journal)
        assert [event.failed.message for event in job.events if event.HasField("failed")] == []
    assert "resumes from checkpoint inc001-it000001" in said
    assert (summary["iterations"], summary["lost"], summary["duplicates"]) == (2, 0, 0), "the store knows only one"
    assert draws == expected_draws(iterations=2, prompts=8, group_size=4)
