"""A job that publishes its metrics: all of them, and without ever waiting for a tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import Condition, generating, running, small_job
from tests.unit.tracking.rows import read_scalars
from tidegate.v1 import types_pb2


def tracked_job(**tracking: Any) -> dict[str, Any]:
    return small_job(
        "tracked",
        cluster={"nodes": {"n0": 3}, "component_placement": {"actor": "0", "rollout": "1", "inference": "2"}},
        algorithm__iterations=2,
        algorithm__kl_coefficient=0.0,
        actor__layout={},
        tracking={"tensorboard": True, **tracking},
    )


def joined() -> Condition:
    return lambda event: event.HasField("instance_joined")


def reported(iteration: int) -> Condition:
    return lambda event: (
        event.HasField("iteration_reported") and event.role == types_pb2.ROLE_ACTOR and event.iteration == iteration
    )


@pytest.mark.long
async def test_a_tracker_that_stands_still_holds_up_no_job_and_then_writes_all_rows(tmp_path: Path) -> None:
    async with running(tracked_job(), tmp_path) as job:
        await job.until(joined())
        tracker = job.service("tidegate.tracking")
        tracker.suspend()
        await job.until(reported(0))
        await job.until(generating(1))
        tracker.resume()
        result = await job.result()
    scalars = read_scalars(job.folder.tensorboard)
    points = {scalar.step: scalar.value for scalar in scalars["iteration/reward_mean"]}
    rows = result["job"]["iterations"]
    assert points == pytest.approx({step: row["metrics"]["reward_mean"] for step, row in enumerate(rows)})
    assert [scalar.value for scalar in scalars["samples/trained"]] == [32, 32]
    points = {scalar.step: scalar.value for scalar in scalars["seconds/iteration"]}
    assert points == pytest.approx(dict(enumerate(result["seconds"].values())))
    said = (job.folder.attempt().logs / "tracking.jsonl").read_text()
    assert '"event": "closed"' in said
    assert '"dropped": 0' in said


@pytest.mark.long
@pytest.mark.parametrize("how", ["stands still for ever", "is killed", "cannot write"])
async def test_a_tracker_that_fails_changes_nothing_of_a_jobs_end(how: str, tmp_path: Path) -> None:
    if how == "cannot write":
        (tmp_path / "tracked").mkdir()
        (tmp_path / "tracked" / "tensorboard").write_text("a file in the place of the folder")
    async with running(tracked_job(close_timeout_s=0.5), tmp_path) as job:
        await job.until(joined())
        tracker = job.service("tidegate.tracking")
        match how:
            case "stands still for ever":
                tracker.suspend()
            case "is killed":
                tracker.kill()
        summary = (await job.result())["summary"]
    want = {"iterations": 2, "samples_generated": 64, "samples_trained": 64, "duplicates": 0, "lost": 0}
    assert {key: summary[key] for key in want} == want
    source, words = {
        "stands still for ever": ("launcher", "tracker killed: some metrics may be missing"),
        "is killed": ("launcher", "process ended"),
        "cannot write": ("tracking", "it could not be opened: FileExistsError"),
    }[how]
    assert words in (job.folder.attempt().logs / f"{source}.jsonl").read_text()
