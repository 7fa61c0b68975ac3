"""A whole job on a data set with a Python function as reward, which fails on some samples and hangs on others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import generating, running, small_job
from tests.e2e.lineage import expected_draws, trained_draws, without_incarnation
from tidegate.tasks.tokenizer import build_tokenizer

COLOURS = ("red", "green", "blue")
GRADING = '''
import os
import threading


def share(response, answer, fault):
    """How much of the response is the answer; some records make it fail."""
    match fault:
        case "raise":
            raise KeyError("no such colour")
        case "die":
            os._exit(3)
        case "hang":
            threading.Event().wait()
    words = response.split()
    return words.count(answer) / max(len(words), 1)
'''
DRAWS = expected_draws(iterations=2, prompts=8, group_size=4)
WANT = {"iterations": 2, "samples_generated": 64, "samples_trained": 64, "duplicates": 0, "lost": 0}


def job_on_data(folder: Path, *, faults: dict[int, str] | None = None) -> dict[str, Any]:
    """Eight records, two iterations with each record once. `faults` are by the line of their record."""
    faults = faults or {}
    rows = [
        {"question": f"say {COLOURS[n % 3]}", "answer": COLOURS[n % 3], "fault": faults.get(n, "")} for n in range(1, 9)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grading.py").write_text(GRADING)
    build_tokenizer(["say", *COLOURS]).save(folder / "tokenizer.json")
    raw = small_job(
        "data",
        cluster={"nodes": {"n0": 4}, "component_placement": {"actor": "0", "rollout": "1,2", "inference": "3"}},
        data={"train": "train.jsonl", "prompt_key": "question", "answer_key": "answer"},
        rewards=[
            {"name": "function", "path": "grading:share", "timeout_s": 1 if faults else 60},
            {"name": "exact_match", "weight": 0.5},
        ],
        model__tokenizer="tokenizer.json",
        rollout={"num_reward_workers": 4},
        algorithm__iterations=2,
        algorithm__max_new_tokens=6,
        algorithm__kl_coefficient=0.0,
        actor__layout={},
        actor__warm_up={},
    )
    del raw["task"]
    return raw


@pytest.mark.long
async def test_a_job_on_data_trains_each_sample_once_and_names_those_on_which_a_reward_fails(tmp_path: Path) -> None:
    raw = job_on_data(tmp_path, faults={2: "raise", 5: "die", 7: "hang"})
    async with running(raw, tmp_path) as job:
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == DRAWS
        log = (job.folder.attempt().logs / "rollout@n0.jsonl").read_text()
    assert {key: summary[key] for key in WANT} == WANT
    assert 0 < summary["reward_first"] < 1
    assert summary["failed_rewards"] == 24
    faults = [json.loads(line)["fault"] for line in log.splitlines() if '"reward counted as 0"' in line]
    want_counts = {
        f"/train.jsonl:2) raised KeyError: 'no such colour' at {tmp_path}/grading.py:10 in share": 8,
        "/train.jsonl:5) ended the process with status 3": 8,
        "/train.jsonl:7) gave no result within 1 s": 8,
    }
    assert {want: sum(fault.endswith(want) for fault in faults) for want in want_counts} == want_counts
    assert all(fault.startswith("reward grading:share on sample 1.") for fault in faults)


@pytest.mark.long
async def test_the_loss_of_a_reward_judge_changes_neither_samples_nor_weights(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "killed").mkdir()
    async with running(job_on_data(tmp_path / "plain"), tmp_path / "plain") as job:
        want = (await job.result())["summary"]
        lineage = without_incarnation(job.folder.journal)
    async with running(job_on_data(tmp_path / "killed"), tmp_path / "killed") as job:
        await job.until(generating(0))
        job.service("services.rollout").kill()
        summary = (await job.result())["summary"]
        assert without_incarnation(job.folder.journal) == lineage
    assert {key: summary[key] for key in WANT} == WANT
    assert summary["weights_checksum"] == want["weights_checksum"]


@pytest.mark.long
async def test_a_failure_that_is_fatal_ends_the_job_and_names_the_sample(tmp_path: Path) -> None:
    raw = job_on_data(tmp_path, faults={5: "raise"})
    raw["rewards"][0]["on_error"] = "fatal"
    async with running(raw, tmp_path) as job:
        assert await job.process.wait() == 1
        end = json.loads(job.folder.result.read_text())
    assert end["end"] == "failed"
    assert end["message"].endswith(" --resume")
    assert "reward grading:share on sample 1.0." in end["message"]
    assert (
        f"/train.jsonl:5) raised KeyError: 'no such colour' at {tmp_path}/grading.py:10 in share; on_error: zero would"
        in end["message"]
    )


@pytest.mark.long
async def test_a_reward_that_fails_on_almost_all_responses_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    raw = job_on_data(tmp_path)
    # It is right about the right answer, which the trial before the start gives it.
    (tmp_path / "grading.py").write_text("def share(response, answer):\n    return {answer: 1.0}[response]\n")
    async with running(raw, tmp_path) as job:
        assert await job.process.wait() == 1
        end = json.loads(job.folder.result.read_text())
    assert end["end"] == "failed"
    assert "of the iteration's 32 samples, more than rewards.0.max_failed=0.5 allows" in end["message"]
    assert f'  File "{tmp_path}/grading.py", line 2, in share' in end["message"]
