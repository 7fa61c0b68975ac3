"""The record of a submitted job survives its JSON, and has GPUs only while it may use them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.cluster_jobs import submitted
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.types import GpuId


def test_a_record_survives_its_json() -> None:
    queued = submitted("one", priority=-3)
    running = replace(queued, state=SubmissionState.RUNNING, gpus=(GpuId("n0/3"), GpuId("n0/1")), starts=2)
    ended = replace(queued, state=SubmissionState.ENDED, end="failed", message="a\nb", is_cancelled=True)
    for each in (queued, running, ended):
        assert Submission.parse(each.to_json()) == each


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("job", "No Name", "must be 1-48 characters"),
        ("priority", 1.5, "priority is 1.5"),
        ("starts", -1, "starts is -1"),
        ("interruptions", True, "interruptions is True"),
        ("needs", [2, -1], "a count of needs is -1"),
        ("state", "asleep", "asleep"),
        ("gpus", ["n0/1"], "queued and has 1 GPUs"),
        ("is_cancelled", 1, "is_cancelled is 1"),
        ("treatment", "kindly", "kindly"),
    ],
)
def test_another_text_is_refused(field: str, value: object, words: str) -> None:
    fields = json.loads(submitted("one").to_json())
    with pytest.raises(ValueError, match=words):
        Submission.parse(json.dumps(fields | {field: value}).encode())
    del fields[field]
    with pytest.raises(ValueError, match=field):
        Submission.parse(json.dumps(fields).encode())


def test_a_job_has_gpus_only_while_it_is_placed_or_running() -> None:
    for state in SubmissionState:
        is_placed = state in (SubmissionState.PLACED, SubmissionState.RUNNING)
        with pytest.raises(ValueError, match="only a placed one has any"):
            replace(submitted("one"), state=state, gpus=() if is_placed else (GpuId("n0/0"),))
