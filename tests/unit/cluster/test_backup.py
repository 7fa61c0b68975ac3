"""A backup survives its JSON, and its jobs go on from their checkpoints."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.cluster_jobs import of_size, submitted
from tidegate.cluster.backup import BackedUpJob, Backup, restored
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.types import GpuId, NodeId


def job(name: str, **changes: Any) -> BackedUpJob:
    config = of_size(name, 4).to_json()
    return BackedUpJob(replace(submitted(name), config=hashlib.sha256(config.encode()).hexdigest(), **changes), config)


RUNNING: dict[str, Any] = {"state": SubmissionState.RUNNING, "gpus": (GpuId("n0/3"),), "starts": 2}
ENDED: dict[str, Any] = {"state": SubmissionState.ENDED, "end": "failed", "message": "no disk"}
CLEARED = BackedUpJob(replace(submitted("old"), **ENDED, is_cleared=True), "")
BACKUP = Backup(1_700_000_000_000, (job("one", **RUNNING), job("two", priority=-3), CLEARED), (NodeId("n1"),))


def test_a_backup_survives_its_json() -> None:
    assert Backup.parse(BACKUP.to_json().encode()) == BACKUP


def _job_without_config(fields: dict[str, Any]) -> None:
    fields["jobs"][0]["config"] = ""


def _configs_exchanged(fields: dict[str, Any]) -> None:
    one, two = fields["jobs"][:2]
    one["config"], two["config"] = two["config"], one["config"]


def _job_renamed(fields: dict[str, Any]) -> None:
    fields["jobs"][0]["record"]["job"] = "other"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields.update(format=2), "format 2, and this release reads 1"),
        (lambda fields: fields.pop("drained"), "a backup has no 'drained'"),
        (lambda fields: fields.update(jobs={}), "jobs is"),
        (lambda fields: fields.update(made_unix_ms=-1), "made_unix_ms is -1"),
        (lambda fields: fields["jobs"][1]["record"].update(state="asleep"), "asleep"),
        (_job_without_config, "job one has no config"),
        (_configs_exchanged, "the config of job one is not the one that its record names"),
        (_job_renamed, "the config of job other is of job one"),
    ],
)
def test_another_text_is_refused(change: Any, words: str) -> None:
    fields = json.loads(BACKUP.to_json())
    change(fields)
    with pytest.raises(ValueError, match=words):
        Backup.parse(json.dumps(fields).encode())


def test_a_restored_job_has_no_gpus_and_goes_on_from_its_checkpoint() -> None:
    was_running, waited = (restored(each.record) for each in BACKUP.jobs[:2])
    for each in (was_running, waited):
        assert (each.state, each.gpus, each.treatment) == (SubmissionState.QUEUED, (), Treatment.RESUME)
        assert each.starts, "a start after the first begins where it finds no folder"
    assert (was_running.starts, waited.priority) == (2, -3)


def test_an_ended_job_stays_ended_and_has_nothing_in_the_stores() -> None:
    ended = replace(submitted("old"), **ENDED)
    assert restored(ended) == replace(ended, is_cleared=True)


@pytest.mark.parametrize("state", [SubmissionState.QUEUED, SubmissionState.PLACED])
def test_a_job_that_first_removes_files_is_not_started(state: SubmissionState) -> None:
    gpus = (GpuId("n0/0"),) if state is SubmissionState.PLACED else ()
    forced: Submission = replace(submitted("one"), treatment=Treatment.FORCE, state=state, gpus=gpus)
    found = restored(forced)
    assert (found.state, found.end) == (SubmissionState.ENDED, "interrupted")
    assert "submit it again" in found.message
    assert restored(replace(forced, **RUNNING)).state is SubmissionState.QUEUED, "it has removed them"
