"""Evaluations of a whole job: each reported once, with the same figures whatever died, and never trained on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import Condition, RunningJob, Victim, running, service_of, small_job, worker_of
from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.v1.events_pb2 import Event

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DRAWS = expected_draws(iterations=3, prompts=8, group_size=4)
VERSIONS = [0, 2, 3]
SECTION = {
    "every": 2,
    "num_prompts": 6,
    "samples_per_prompt": 4,
    "pass_at": [1, 4],
    "temperature": 1.0,
    "max_new_tokens": 40,
}


def evaluated_job(name: str) -> dict[str, Any]:
    return small_job(name) | {"evaluation": SECTION}


def evaluating(version: int) -> Condition:
    """Some prompts are answered, and others are not."""

    def condition(event: Event) -> bool:
        progress = event.progress
        is_it = event.WhichOneof("body") == "progress" and progress.phase == "evaluate" and event.iteration == version
        return is_it and progress.num_done < progress.num_total

    return condition


async def evaluations(job: RunningJob) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The finished job's evaluations by its record, and its summary."""
    result = await job.result()
    assert trained_draws(job.folder.journal) == DRAWS
    rows = result["job"]["evaluations"]
    for row in rows:
        row.pop("incarnation")
    assert [row.get("version", 0) for row in rows] == VERSIONS
    return rows, result["summary"]


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The evaluations of a job when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")

    async def undisturbed() -> list[dict[str, Any]]:
        async with running(evaluated_job("undisturbed"), folder) as job:
            rows, _ = await evaluations(job)
        reports = [event for event in job.events if event.WhichOneof("body") == "evaluation_reported"]
        assert [event.evaluation_reported.version for event in reports] == VERSIONS
        return rows

    return asyncio.run(undisturbed())


async def test_evaluations_change_neither_samples_nor_weights(
    want: list[dict[str, Any]], want_checksum: str, tmp_path: Path
) -> None:
    async with running(evaluated_job("evaluated"), tmp_path) as job:
        rows, summary = await evaluations(job)
    assert rows == want
    assert summary["weights_checksum"] == want_checksum
    assert (summary["samples_generated"], summary["samples_trained"]) == (DRAWS.total(), DRAWS.total())
    for row in rows:
        assert (row["num_prompts"], row["samples_per_prompt"]) == (6, 4)
        metrics = row["metrics"]
        assert metrics["countdown/mean"] == metrics["countdown/pass@1"] == metrics["reward_mean"]
        assert metrics["countdown/pass@1"] <= metrics["countdown/pass@4"]
    lines = (job.folder.evaluations / "version000002.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["responses"]) for line in lines] == [4] * 6


KILLED: dict[str, tuple[Victim, int]] = {
    "the rollout's service, in the first": (service_of("services.rollout", "n0"), 0),
    "the rollout's service, as an iteration trains": (service_of("services.rollout", "n0"), 2),
    "the rollout's service, in the last": (service_of("services.rollout", "n0"), 3),
    "an engine": (worker_of("n0/2"), 2),
    "the actor's service": (service_of("services.actor", "n0"), 2),
    "the scheduler": (service_of("services.scheduler"), 2),
}


@pytest.mark.parametrize("case", KILLED)
async def test_each_evaluation_is_reported_once_with_the_same_figures_whatever_dies_in_it(
    case: str, want: list[dict[str, Any]], want_checksum: str, tmp_path: Path
) -> None:
    victim, version = KILLED[case]
    async with running(evaluated_job("killed"), tmp_path) as job:
        await job.until(evaluating(version))
        victim(job).kill()
        rows, summary = await evaluations(job)
    assert rows == want
    assert (summary["weights_checksum"], summary["lost"], summary["duplicates"]) == (want_checksum, 0, 0)


async def test_a_job_that_is_stopped_in_its_last_evaluation_makes_it_when_it_is_resumed(
    want: list[dict[str, Any]], tmp_path: Path
) -> None:
    async with running(evaluated_job("stopped"), tmp_path) as job:
        await job.until(evaluating(3))
        job.process.terminate()
        await asyncio.wait_for(job.process.wait(), 60)
    async with running(evaluated_job("stopped"), tmp_path, "--resume") as job:
        rows, _ = await evaluations(job)
    assert rows == want
