"""A backup survives its JSON, and its jobs go on from their checkpoints."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.cluster_jobs import of_size, submitted
from tidegate.cluster.backup import BackedUpJob, Backup
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.types import Drain, GpuId, NodeId


def job(name: str, **changes: Any) -> BackedUpJob:
    config = of_size(name, 4).to_json()
    record = replace(submitted(name), config=hashlib.sha256(config.encode()).hexdigest(), **changes)
    return BackedUpJob(record.to_json().decode(), config)


RUNNING: dict[str, Any] = {"state": SubmissionState.RUNNING, "gpus": (GpuId("n0/3"),), "starts": 2}
ENDED: dict[str, Any] = {"state": SubmissionState.ENDED, "end": "failed", "message": "no disk"}
ONE, TWO = job("one", **RUNNING), job("two")
DRAINED = {NodeId("n1"): Drain.LEAVE, NodeId("n2"): Drain.STAY}
BACKUP = Backup(1_700_000_000_000, (ONE, TWO), DRAINED)


def test_a_backup_survives_its_json() -> None:
    assert Backup.parse(BACKUP.to_json().encode()) == BACKUP
    earlier = {name: value for name, value in json.loads(BACKUP.to_json()).items() if name != "keeping_jobs"}
    assert Backup.parse(json.dumps(earlier).encode()).drained == dict.fromkeys(DRAINED, Drain.LEAVE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2, and this release reads 1"),
        ({"jobs": {}}, "jobs is"),
        ({"jobs": [{"record": "", "config": 3}]}, "config is 3"),
        ({"jobs": [{"config": ""}]}, "a backup has no 'record'"),
        ({"made_unix_ms": -1}, "made_unix_ms is -1"),
        ({"drained": [1]}, "a node is 1"),
    ],
)
def test_another_text_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Backup.parse(json.dumps(json.loads(BACKUP.to_json()) | change).encode())


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (replace(ONE, record="{"), "Expecting property name"),
        (replace(ONE, config=TWO.config), "the config of job one is not the one that its record names"),
        (replace(ONE, record=ONE.record.replace('"one"', '"other"')), "the config of job other is of job one"),
        (replace(ONE, record=ONE.record.replace("running", "asleep")), "asleep"),
    ],
)
def test_a_damaged_job_is_refused(damaged: BackedUpJob, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        damaged.restored()


def test_a_restored_job_has_no_gpus_and_goes_on_from_its_checkpoint() -> None:
    was_running, waited = ONE.restored(), job("two", priority=-3).restored()
    for each in (was_running, waited):
        assert (each.state, each.gpus, each.treatment) == (SubmissionState.QUEUED, (), Treatment.RESUME)
        assert each.starts, "a start after the first begins where it finds no folder"
    assert (was_running.starts, waited.priority) == (2, -3)


def test_an_ended_job_stays_ended_and_has_nothing_in_the_stores() -> None:
    found = job("old", **ENDED)
    assert found.restored() == replace(Submission.parse(found.record.encode()), is_cleared=True)
    assert replace(found, config="").restored() == found.restored()


def test_a_job_without_its_config_ends_and_says_so() -> None:
    found = replace(ONE, config="").restored()
    assert (found.state, found.end, found.gpus) == (SubmissionState.ENDED, "failed", ())
    assert "its config was lost" in found.message


@pytest.mark.parametrize("state", [SubmissionState.QUEUED, SubmissionState.PLACED])
def test_a_job_that_first_removes_files_is_not_started(state: SubmissionState) -> None:
    gpus = (GpuId("n0/0"),) if state is SubmissionState.PLACED else ()
    found = job("one", treatment=Treatment.FORCE, state=state, gpus=gpus).restored()
    assert (found.state, found.end) == (SubmissionState.ENDED, "interrupted")
    assert "submit it again" in found.message
    began = job("one", treatment=Treatment.FORCE, **RUNNING)
    assert began.restored().state is SubmissionState.QUEUED, "it has removed them"
