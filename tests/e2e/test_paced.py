"""Whole jobs on modelled slots with drawn lengths: the same weights as without a pace, and a void run told as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import running, small_job
from tidegate.job import load_job
from tidegate.recorded import RecordedRun, recorded
from tidegate.types import SampleId

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LAW = {"median_tokens": 8, "sigma_prompt": 0.8, "sigma_group": 0.5}
NO_TIME = {"time_scale": 1e-6, "cores_per_slot": 0.01}
"""Modelled steps of some nanoseconds: each real one is late."""


async def finished(folder: Path, **changes: Any) -> tuple[dict[str, Any], RecordedRun]:
    """The summary of a job with drawn lengths, and its record."""
    async with running(small_job("paced", rollout__length_law=LAW, **changes), folder) as job:
        result = await job.result()
    return result["summary"], recorded(job.folder.root)


async def test_a_paced_job_has_the_weights_and_lengths_of_an_unpaced_one_and_says_when_it_is_void(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    unpaced, run = await finished(tmp_path_factory.mktemp("unpaced"))
    paced, paced_run = await finished(tmp_path_factory.mktemp("paced"), cluster__pace=NO_TIME)
    assert unpaced["pace"] is None
    assert paced["pace"]["is_void"]
    assert paced["pace"]["num_late"] == paced["pace"]["num_steps"] > 0
    assert paced["weights_checksum"] == unpaced["weights_checksum"]
    job, algorithm = load_job(run.config), run.config.algorithm
    for iteration, (one, other) in enumerate(zip(run.iterations, paced_run.iterations, strict=True)):
        first = iteration * algorithm.prompts_per_iteration
        want = tuple(
            tuple(job.drawn_length(SampleId(1, iteration, prompt, draw)) for draw in range(algorithm.group_size))
            for prompt in range(first, first + algorithm.prompts_per_iteration)
        )
        assert one.lengths == other.lengths == want
