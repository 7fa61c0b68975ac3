"""`get nodes`: who has the slots of a cluster's nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import execute
from cli.nodes import node_rows
from cli.usage import BadUsage
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
