"""A running job whose GPUs a person moves by the commands: nothing is lost, and its weights are those of a job left
alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from tests.e2e.jobs import RunningJob, generating, running, small_job, updated
from tests.e2e.lineage import expected_draws, trained_draws
from tests.e2e.moving import GROUP_SIZE, PROMPTS, moved, moving_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ITERATIONS = 6
JOB = moving_job("static", algorithm__iterations=ITERATIONS)
"""The actor is on n0/0, engines are on n0/1 and n1/0, the inference is on n1/1."""


def gpus_of(described: dict[str, Any]) -> dict[str, list[str]]:
    return {each["role"]: each["gpus"] for each in described["components"]}


async def test_a_job_that_is_split_drained_and_migrated_by_hand_has_the_weights_of_one_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone := tmp_path / "alone").mkdir()
    async with running(JOB, alone) as job:
        want = (await job.result())["summary"]["weights_checksum"]
        assert moved(job) == set()
    async with running(JOB, tmp_path) as job:

        async def said(command: str, *arguments: str) -> tuple[int, str]:
            folder = ["--output-dir", str(job.folder.root.parent)]
            code = await asyncio.to_thread(main, [command, job.config.job, *arguments, *folder])
            out = capsys.readouterr()
            return code, out.out + out.err

        async def described() -> dict[str, Any]:
            code, text = await said("describe", "-o", "json")
            assert code == 0, text
            found: dict[str, Any] = json.loads(text)
            return found

        await by_hand(job, said, described)
        result = await job.result()
    summary = result["summary"]
    assert trained_draws(job.folder.journal) == expected_draws(
        iterations=ITERATIONS, prompts=PROMPTS, group_size=GROUP_SIZE
    )
    assert (summary["lost"], summary["duplicates"]) == (0, 0)
    assert summary["weights_checksum"] == want
    assert {"n1/0", "n0/1"} & moved(job) == {"n1/0"}
    assert {event.incarnation for event in job.events if event.incarnation} == {1}


async def by_hand(job: RunningJob, said: Any, described: Any) -> None:
    await job.until(generating(0))
    code, plan = await said("scale", "--rollout", "1", "--actor", "2", "--dry-run")
    assert code == 0, plan
    assert [line.split()[1:5] for line in plan.splitlines()[1:3]] == [
        ["rollout", "resize", "n1/0", "-"],
        ["actor", "resize", "-", "n1/0"],
    ]
    assert not any(event.WhichOneof("body") == "split_requested" for event in job.events)
    code, text = await said("scale", "--rollout", "1", "--actor", "2", "--wait")
    assert (code, text) == (0, "job moving: is there now: actor dp2 on n0/0, n1/0; rollout single on n0/1\n")
    code, refusal = await said("scale", "--actor", "4")
    assert code == 2
    assert refusal.endswith("with the others so, the actor can have 1, 2; its instances live on n0, n1\n")
    await job.until(updated(1))
    code, text = await said("drain", "n1/0", "--wait")
    assert code == 0, text
    found = await described()
    assert (gpus_of(found)["actor"], found["drained_gpus"]) == (["n0/0"], ["n1/0"])
    assert (await said("scale", "--actor", "1", "--wait"))[0] == 0
    assert (await said("drain", "n1/0", "--undo"))[0] == 0
    code, text = await said("migrate", "--from", "n0/1", "--to", "n1/0", "--wait")
    assert (code, text) == (0, "job moving: is there now: rollout single on n1/0\n")
    assert gpus_of(await described()) == {"actor": ["n0/0"], "rollout": ["n1/0"], "inference": ["n1/1"]}


async def test_a_layout_that_the_model_cannot_have_is_refused_at_once_with_the_legal_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has two layers, two KV heads and four logical shards."""
    async with running(small_job("refusing"), tmp_path) as job:
        await job.until(generating(0))
        for layout, want in (
            ("pp=3", "legal pp: 1, 2"),
            ("tp=4", "legal tp: 1, 2"),
            ("dp=3", "legal dp: 1, 2, 4"),
        ):
            command = ["scale", "refusing", "--layout", layout, "--output-dir", str(tmp_path)]
            assert await asyncio.to_thread(main, command) == 2
            assert want in capsys.readouterr().err
        assert not any(event.WhichOneof("body") in ("resize_requested", "split_requested") for event in job.events)
