"""Dynamic sampling in whole jobs: seed and rewards decide which prompts are taken and trained, whatever dies."""

from __future__ import annotations

import asyncio
import json
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
    small_job,
    updated,
    worker_of,
)
from tests.e2e.lineage import trained_draws, without_incarnation
from tidegate.tasks.tokenizer import build_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ITERATIONS, PROMPTS, GROUP_SIZE, MAX_EXTRA = 3, 4, 4, 60
COLOURS = ("red", "green", "blue")
GRADING = '''
def begins(response, answer):
    """Whether the response begins with the answer."""
    return float(response.split()[:1] == [answer])
'''


def replacing_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job on two nodes. About half of its groups have no spread."""
    rows = [{"question": f"say {COLOURS[n % 3]}", "answer": COLOURS[n % 3]} for n in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grading.py").write_text(GRADING)
    build_tokenizer(["say", *COLOURS]).save(folder / "tokenizer.json")
    raw = small_job(
        "dynamic",
        data={"train": "train.jsonl", "prompt_key": "question", "answer_key": "answer"},
        rewards=[{"name": "function", "path": "grading:begins", "timeout_s": 60}],
        model__tokenizer="tokenizer.json",
        algorithm__iterations=ITERATIONS,
        algorithm__prompts_per_iteration=PROMPTS,
        algorithm__group_size=GROUP_SIZE,
        algorithm__max_new_tokens=6,
        algorithm__filter_zero_std=True,
        algorithm__max_extra_prompts=MAX_EXTRA,
        actor__warm_up={},
        **changes,
    )
    del raw["task"]
    return raw


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
