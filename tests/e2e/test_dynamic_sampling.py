"""Dynamic sampling in whole jobs: seed and rewards decide which prompts are taken and trained, whatever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.jobs import (
    Condition,
    RunningJob,
    Victim,
    generating,
    running,
    service_of,
    updated,
    worker_of,
)
from tests.e2e.lineage import trained_draws, without_incarnation
from tests.e2e.replacing import GROUP_SIZE, ITERATIONS, PROMPTS, replacing_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


class Undisturbed(NamedTuple):
    summary: dict[str, Any]
    updates: list[tuple[str, list[str]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    async def run() -> Undisturbed:
        folder = tmp_path_factory.mktemp("undisturbed")
        async with running(replacing_job(folder), folder) as job:
            summary = (await job.result())["summary"]
            return Undisturbed(summary, without_incarnation(job.folder.journal))

    return asyncio.run(run())


def test_every_iteration_trains_as_many_groups_as_asked_for_and_all_that_was_generated_is_accounted_for(
    undisturbed: Undisturbed,
) -> None:
    summary, updates = undisturbed
    assert summary["samples_trained"] == ITERATIONS * PROMPTS * GROUP_SIZE
    assert summary["samples_filtered"] > 0, "some groups had no spread"
    assert summary["samples_generated"] == summary["samples_trained"] + summary["samples_filtered"]
    assert (summary["lost"], summary["duplicates"]) == (0, 0)
    assert [update for update, _ in updates] == [f"{i}.{m}" for i in range(ITERATIONS) for m in range(2)]
    assert {len(samples) for _, samples in updates} == {PROMPTS // 2 * GROUP_SIZE}


KILLS: dict[str, tuple[Victim, Condition]] = {
    "the rollout's service that leads": (service_of("services.rollout", "n0"), generating(1)),
    "the rollout's other service": (service_of("services.rollout", "n1"), generating(1)),
    "the inference's service with its worker": (service_of("services.inference", "n1"), generating(1)),
    "the actor's service between two updates": (service_of("services.actor", "n0"), updated(1)),
    "an engine": (worker_of("n0/2"), generating(1)),
    "a rank of the actor": (worker_of("n0/0"), generating(1)),
    "the scheduler": (service_of("services.scheduler"), generating(1)),
}


@pytest.mark.parametrize("case", KILLS)
async def test_a_kill_changes_no_group_that_dynamic_sampling_trains(
    case: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    victim, when = KILLS[case]
    async with running(replacing_job(tmp_path), tmp_path) as job:
        await job.until(when)
        victim(job).kill()
        await _as_undisturbed(job, undisturbed)


async def test_a_resumed_job_with_dynamic_sampling_takes_the_same_prompts(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    async with running(replacing_job(tmp_path), tmp_path) as job:
        await job.until(generating(1))
        job.process.kill()
        await job.process.wait()
    async with running(replacing_job(tmp_path), tmp_path, "--resume") as job:
        await _as_undisturbed(job, undisturbed)


async def _as_undisturbed(job: RunningJob, want: Undisturbed) -> None:
    summary = (await job.result())["summary"]
    assert without_incarnation(job.folder.journal) == want.updates
    assert set(trained_draws(job.folder.journal).values()) == {1}
    same = ("samples_generated", "samples_trained", "samples_filtered", "lost", "duplicates", "weights_checksum")
    assert {key: summary[key] for key in same} == {key: want.summary[key] for key in same}
