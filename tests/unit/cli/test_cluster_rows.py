"""What commands say of a cluster and its nodes, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli.cluster import notes_of
from cli.command import execute
from cli.nodes import node_rows
from cli.usage import BadUsage
from tests.unit.cluster_jobs import submitted
from tidegate.cluster.kept_queue import Kept, KeptJob
from tidegate.cluster.slots import Slots
from tidegate.cluster.submissions import SubmissionState
from tidegate.types import Drain, JobId, NodeId
from tidegate.v1 import cluster_pb2, control_pb2

KEEPS = "its machine keeps the cluster"


def gpu(name: str, job: str = "") -> control_pb2.GpuStatus:
    return control_pb2.GpuStatus(gpu=name, job=job)


def test_a_slot_is_free_where_neither_a_placed_job_nor_the_ownership_map_has_it() -> None:
    gpus = [gpu("n0/0", "one"), gpu("n0/1"), gpu("n0/2"), gpu("n1/0", "killed"), gpu("n1/1")]
    gpus.append(gpu("n2/0"))
    there = cluster_pb2.ListClusterGpusResponse(
        gpus=gpus,
        drained_nodes=["n1"],
        nodes_keeping_jobs=["n1"],
        away=[cluster_pb2.NodeAway(node="n2", seconds=3.2, reason="it is old")],
        places=cluster_pb2.Places(machines={"n0": "a", "n2": "b"}, keeper="a"),
    )
    placed = [cluster_pb2.Submission(job="one", gpus=["n0/0", "n0/1"]), cluster_pb2.Submission(job="waits")]
    rows = node_rows(there, placed)
    assert rows == [
        {"node": "n0", "state": "ready", "machine": "a", "slots": 3, "free": 1, "jobs": ["one"], "message": KEEPS},
        {
            "node": "n1",
            "state": "drained",
            "machine": None,
            "slots": 2,
            "free": 1,
            "jobs": ["killed"],
            "message": "its jobs stay until they end",
        },
        {
            "node": "n2",
            "state": "away",
            "machine": "b",
            "slots": 1,
            "free": 0,
            "jobs": [],
            "message": "for 3 s: it is old",
        },
    ]
    assert node_rows(there, placed, ["one"]) == rows[:1]
    assert node_rows(cluster_pb2.ListClusterGpusResponse(), []) == []


def test_a_drain_without_targets_and_without_a_cluster_names_both_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["drain", "demo", "--output-dir", str(tmp_path)])
    said = capsys.readouterr().err
    assert "start one with tidegate up" in said
    assert "tidegate drain demo n0/3" in said


def test_only_nodes_that_are_named_or_of_named_jobs_are_told() -> None:
    there = cluster_pb2.ListClusterGpusResponse(gpus=[gpu("n0/0", "one"), gpu("n1/0")])
    known = [cluster_pb2.Submission(job="one", gpus=["n0/0"])]
    assert [row["node"] for row in node_rows(there, known, ["n1"])] == ["n1"]
    assert [row["node"] for row in node_rows(there, known, ["one"])] == ["n0"]
    with pytest.raises(BadUsage, match="the cluster has no node or job n9; its nodes are n0, n1"):
        node_rows(there, known, ["n9", "n1"])


def test_a_drain_of_gpus_of_no_job_says_how_a_node_is_drained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["drain", "n0", "n1", "--output-dir", str(tmp_path)]) == 2
    assert "a node of a cluster is named alone: tidegate drain n0" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "soon"])
def test_a_wait_is_of_some_seconds(seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["wait", "--timeout", seconds, "--output-dir", str(tmp_path)]) == 2
    assert f"{seconds} is no number of seconds above 0" in capsys.readouterr().err


def test_a_wait_is_for_named_jobs_or_for_all_that_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["wait", "one", "--running", "--output-dir", str(tmp_path)]) == 2
    assert "wait takes jobs or --running, not both" in capsys.readouterr().err


def test_a_cluster_that_begins_says_why_its_jobs_wait(tmp_path: Path) -> None:
    records = {each.job: each for each in (submitted("fits", 4), submitted("large", 9), submitted("over", 9))}
    records[JobId("over")] = replace(records[JobId("over")], state=SubmissionState.ENDED, end="failed")
    jobs = {job: KeptJob(each.to_json(), "") for job, each in records.items()}
    drained = {NodeId("n0"): Drain.LEAVE, NodeId("gone"): Drain.LEAVE}
    where = f"--output-dir {tmp_path}"
    assert notes_of(Kept(jobs, drained, "new disks", faults=("a fault",)), Slots({NodeId("n0"): 8}), tmp_path) == [
        "a fault",
        f"no job starts until tidegate pause --undo {where}: new disks",
        f"drained, and without jobs until tidegate drain NODE --undo {where}: n0",
        "without room in this cluster, and waiting for a larger one: large",
    ]


@pytest.mark.parametrize("flag", ["--dry-run", "--wait"])
def test_the_drain_of_a_node_changes_nothing_where_a_flag_is_not_its_own(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["drain", "n0", flag, "--output-dir", str(tmp_path)]) == 2
    assert f"drain n0 takes no {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [("--undo", "--keep-jobs: not allowed with argument --undo"), ("n0/3", "drain n0 with targets takes no")],
)
def test_a_drain_that_keeps_jobs_is_of_a_node_and_is_none_that_is_undone(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["drain", "n0", words, "--keep-jobs", "--output-dir", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
