"""The jobs of a cluster that is down, as commands show them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cli.command import execute
from tests.unit.cli.configs import small
from tests.unit.cluster_jobs import submitted
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.kept_queue import KeptQueue
from tidegate.cluster.placement import cluster_gpus
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.config.job_config import JobConfig
from tidegate.launcher.outcome import End
from tidegate.types import NodeId

DOWN = "the cluster is down: tidegate up goes on with it"


def keep(output_dir: Path, *jobs: Submission) -> None:
    records: Mapping[str, Submission] = {each.job: each for each in jobs}
    texts = {each.job: each.to_json() for each in jobs}
    KeptQueue(ClusterFolder.of(output_dir).queue).write(
        texts, records.values(), dict.fromkeys(texts, "{}"), drained=(), term=1
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


def test_a_job_of_a_cluster_that_is_down_cannot_be_cancelled(
    output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["cancel", "waits", "--output-dir", str(output_dir)]) == 1
    assert "no cluster is up in" in capsys.readouterr().err
    assert execute(["describe", "nobody", "--output-dir", str(output_dir)]) == 2
    assert "no job 'nobody'" in capsys.readouterr().err
