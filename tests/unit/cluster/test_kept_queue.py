"""The queue in files: written where something has changed, and read again as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.cluster_jobs import submitted
from tidegate.cluster.kept_queue import KeptJob, KeptQueue
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.types import Drain, JobId, NodeId

CONFIG = '{"job": "one"}\n'
NAME = hashlib.sha256(CONFIG.encode()).hexdigest()
ONE, TWO = JobId("one"), JobId("two")
NONE: Mapping[NodeId, Drain] = {}


def write(
    queue: KeptQueue, *records: Submission, drained: Mapping[NodeId, Drain] = NONE, paused: str = "", term: int = 1
) -> list[JobId]:
    """As the loop does. The jobs that were written."""
    texts = {each.job: each.to_json() for each in records}
    changed = queue.changed(texts, {each.job: each for each in records})
    configs = {each.job: CONFIG for each in changed if queue.lacks_config(each)}
    queue.write(texts, changed, configs, drained=drained, paused=paused, term=term)
    return [each.job for each in changed]


def job(name: str) -> Submission:
    return replace(submitted(name), config=NAME)


def ended(name: str) -> Submission:
    return replace(job(name), state=SubmissionState.ENDED, end="finished")


@pytest.mark.usefixtures("umask_022")
def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    queue = KeptQueue(tmp_path / "queue")
    assert queue.read().jobs == {}
    write(queue, job("one"), ended("two"), drained={NodeId("n1"): Drain.STAY}, paused="new disks", term=7)
    found = KeptQueue(tmp_path / "queue").read()
    assert found.jobs == {ONE: KeptJob(job("one").to_json(), CONFIG), TWO: KeptJob(ended("two").to_json(), "")}
    assert (found.drained, found.paused, found.term, found.faults) == ({NodeId("n1"): Drain.STAY}, "new disks", 7, ())
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "queue").glob("*/*.json")} == {0o600}
    folders = [path for path in (tmp_path / "queue", *(tmp_path / "queue").iterdir()) if path.is_dir()]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 3


def test_only_what_has_changed_is_written_and_what_the_store_dropped_goes(tmp_path: Path) -> None:
    queue = KeptQueue(tmp_path)
    assert write(queue, job("one"), job("two")) == [ONE, TWO]
    assert write(queue, job("one"), job("two")) == []
    assert write(queue, job("one"), ended("two")) == [TWO]
    assert not (tmp_path / "configs" / "two.json").exists()
    assert write(queue, job("one")) == []
    assert [*queue.read().jobs] == [ONE]
    assert write(queue, job("one"), job("two")) == [TWO]
    assert queue.read().jobs[TWO].config == CONFIG


def test_a_job_keeps_its_files_where_the_store_has_lost_it(tmp_path: Path) -> None:
    queue = KeptQueue(tmp_path)
    write(queue, job("one"), job("two"))
    write(queue, job("two"))
    assert [*queue.read().jobs] == [ONE, TWO]


def test_a_damaged_file_spoils_no_other(tmp_path: Path) -> None:
    write(KeptQueue(tmp_path), job("one"), job("two"), term=3)
    (tmp_path / "records" / "one.json").write_bytes(b"\xff")
    (tmp_path / "records" / "three.json").write_bytes(job("two").to_json())
    (tmp_path / "cluster.json").write_text('{"term": -1, "drained": []}')
    found = KeptQueue(tmp_path).read()
    assert ([*found.jobs], found.term) == ([TWO], 0)
    for name, fault in zip(("one.json", "three.json", "cluster.json"), found.faults, strict=True):
        assert name in fault
