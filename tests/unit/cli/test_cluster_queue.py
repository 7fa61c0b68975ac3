"""The jobs of a cluster that is down, as commands show them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli import cluster_queue
from cli.command import execute
from tests.unit.cli.configs import small
from tests.unit.cluster_jobs import submitted
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.kept_queue import KeptQueue
from tidegate.cluster.placement import cluster_gpus
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.config.job_config import JobConfig
from tidegate.launcher.lock import LOCK, held
from tidegate.launcher.outcome import End, Outcome
from tidegate.types import NodeId
from tidegate.v1 import cluster_pb2, control_pb2

DOWN = "the cluster is down: tidegate up goes on with it"


def keep(output_dir: Path, *jobs: Submission) -> None:
    records: Mapping[str, Submission] = {each.job: each for each in jobs}
    texts = {each.job: each.to_json() for each in jobs}
    KeptQueue(ClusterFolder.of(output_dir).queue).write(
        texts, records.values(), dict.fromkeys(texts, "{}"), drained={}, paused="", term=1
    )


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """One job waits, one ran when the cluster went down, and one ended before it had a folder."""
    gpus = cluster_gpus({NodeId("n0"): 4})
    ran = replace(submitted("ran"), state=SubmissionState.RUNNING, gpus=gpus, starts=1)
    ended = replace(submitted("ended"), state=SubmissionState.ENDED, end=End.FAILED, message="too large")
    keep(tmp_path, submitted("waits"), ran, ended)
    (tmp_path / "ran").mkdir()
    (tmp_path / "ran" / "config.json").write_text(JobConfig.model_validate(small(tmp_path)).to_json())
    return tmp_path


def test_the_queue_of_a_cluster_that_is_down_is_told(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["get", "jobs", "--output-dir", str(output_dir), "-o", "json"]) == 0
    rows = {each["job"]: (each["state"], each["message"]) for each in json.loads(capsys.readouterr().out)}
    assert rows == {"waits": ("queued", DOWN), "ran": ("killed", DOWN), "ended": ("failed", "too large")}


@pytest.mark.parametrize(
    ("job", "told"), [("waits", f"job waits: queued ({DOWN})"), ("ended", "job ended: failed (too large)")]
)
def test_a_job_without_a_folder_is_described_by_the_queue(
    job: str, told: str, output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["describe", job, "--output-dir", str(output_dir)]) == 0
    assert told in capsys.readouterr().out


def write_outcome(output_dir: Path, end: End, reason: str) -> None:
    status = control_pb2.GetJobResponse(job="ran", num_iterations=3)
    Outcome(end, reason, seed=0, wall_s=1.0, job=status).write(output_dir / "ran" / "result.json")


@pytest.mark.parametrize(
    ("end", "record", "state", "message"),
    [
        (End.INTERRUPTED, {}, "interrupted", DOWN),
        (End.INTERRUPTED, {"end": End.FAILED, "message": "no room"}, "failed", "no room"),
        (End.FINISHED, {}, "finished", "done"),
        (End.FINISHED, {"end": End.FAILED, "message": "no room"}, "finished", "done"),
    ],
)
def test_a_job_that_was_interrupted_is_as_the_queue_says(
    end: End,
    record: dict[str, Any],
    state: str,
    message: str,
    output_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_outcome(output_dir, end, "done")
    if record:
        keep(output_dir, replace(submitted("ran"), state=SubmissionState.ENDED, starts=1, **record))
    for command, job in (("get", "jobs"), ("describe", "ran")):
        assert execute([command, job, "--output-dir", str(output_dir), "-o", "json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        row = next(each for each in answer if each["job"] == "ran") if command == "get" else answer
        assert (row["state"], row["message"]) == (state, message)


def test_a_run_by_hand_after_the_clusters_end_is_told_itself(
    output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(output_dir, replace(submitted("ran"), state=SubmissionState.ENDED, end=End.FINISHED, message="old"))
    record = ClusterFolder.of(output_dir).queue / "records" / "ran.json"
    os.utime(record, (1, 1))
    write_outcome(output_dir, End.INTERRUPTED, "by hand")
    assert execute(["describe", "ran", "--output-dir", str(output_dir), "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["message"]) == ("interrupted", "by hand")


def test_a_job_of_a_cluster_that_somebody_runs_by_hand_is_asked_itself(
    output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(output_dir / "ran" / LOCK, RuntimeError):
        assert execute(["cancel", "ran", "--output-dir", str(output_dir)]) == 1
    assert "job ran is starting or ending; try again" in capsys.readouterr().err
    assert execute(["top", "ran", "--once", "--output-dir", str(output_dir)]) == 1
    assert f"job ran does not run now; {DOWN}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("logs", "waits"), ("events", "waits"), ("top", "waits")])
def test_a_job_without_a_folder_says_so(
    words: tuple[str, ...], output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([*words, "--output-dir", str(output_dir)]) == 2
    assert f"job waits is queued ({DOWN}), and has no folder" in capsys.readouterr().err


def test_a_job_of_a_cluster_that_is_down_cannot_be_cancelled(
    output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["cancel", "waits", "--output-dir", str(output_dir)]) == 1
    assert "no cluster is up in" in capsys.readouterr().err
    assert execute(["describe", "nobody", "--output-dir", str(output_dir)]) == 2
    assert "no job 'nobody'" in capsys.readouterr().err


async def test_a_wait_for_all_jobs_is_over_once_the_cluster_has_forgotten_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = cluster_pb2.Submission(job="long", state="running")
    answers = [[long], [long], list[cluster_pb2.Submission]()]

    async def listed(*_: object, **__: object) -> list[cluster_pb2.Submission]:
        return answers.pop(0)

    monkeypatch.setattr(cluster_queue, "_listed", listed)
    monkeypatch.setattr(cluster_queue, "_FOLLOW_S", 0.0)
    (found,) = await cluster_queue.until_ended(ClusterFolder.of(tmp_path), [])
    assert (found.job, found.state, found.message) == ("long", "ended", "forgotten: its folder has its end")
    assert not answers
