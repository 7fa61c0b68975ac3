"""A whole job in bf16, with main parameters in fp32: it repeats and continues from its checkpoints.

It reports the distance between the trainer and the engine, which computes in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import RunningJob, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.v1.events_pb2 import Event

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)
IN_BF16 = {"actor__precision": "bf16", "actor__recompute": "full", "algorithm__importance_cap": 1.0}


async def test_a_job_in_bf16_goes_on_from_its_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    async with running(small_job("plain", **IN_BF16), tmp_path) as job:
        want = await _finished(job)
        reports = [dict(event.iteration_reported.metrics) for event in job.events if _is_actors_report(event)]
    for metrics in reports:
        assert 1e-5 < metrics["mismatch_mean"] < metrics["mismatch_max"] < 0.5
        assert 0 < metrics["mismatch_kl"] < 1e-2
        assert 0.1 < metrics["mismatch_truncated"] < 0.9
    (tmp_path / "killed").mkdir()
    async with running(small_job("plain", **IN_BF16), tmp_path / "killed") as job:
        await job.until(updated(1))
        job.service("services.actor", "n0").kill()
        assert (await _finished(job))["weights_checksum"] == want["weights_checksum"]


async def _finished(job: RunningJob) -> dict[str, Any]:
    summary: dict[str, Any] = (await job.result())["summary"]
    assert trained_draws(job.folder.journal) == DRAWS
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, DRAWS.total())
    return summary


def _is_actors_report(event: Event) -> bool:
    return event.WhichOneof("body") == "iteration_reported" and event.source.startswith("actor")
