"""`tidegate prune`: whose store it removes, what it says that it frees, and what it never touches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.prune import size_bytes
from tests.unit.cli.configs import small_config
from tidegate.gate import Gate
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import Start, claim_folder
from tidegate.launcher.outcome import End, Outcome
from tidegate.types import GpuId, Grant, NodeId, Token
from tidegate.v1 import control_pb2

STORE_BYTES = 5 * 4096


def ended(tmp_path: Path, job: str, end: End | None) -> JobFolder:
    """A job with a store. None: its launcher was killed."""
    config = small_config(tmp_path, job=job)
    with claim_folder(load_job(config), Start.FRESH, now_unix_s=0.0) as claim:
        stream = claim.folder.servers / "nats" / "1.blk"
        stream.parent.mkdir(parents=True)
        stream.write_bytes(bytes(STORE_BYTES))
    if end is not None:
        status = control_pb2.GetJobResponse(job=job)
        Outcome(end, "", seed=0, wall_s=1.0, job=status).write(claim.folder.result)
    return claim.folder


def answers(capsys: pytest.CaptureFixture[str], tmp_path: Path, *flags: str) -> dict[str, dict[str, object]]:
    """The rows by job."""
    assert main(["prune", *flags, "-o", "json", "--output-dir", str(tmp_path / "jobs")]) == 0
    return {row["job"]: row for row in json.loads(capsys.readouterr().out)}


def files_of(folder: JobFolder) -> set[str]:
    return {path.name for path in folder.root.iterdir()}


def test_nothing_is_removed_without_a_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ended(tmp_path, "done", End.FINISHED)
    assert main(["prune", "--output-dir", str(tmp_path / "jobs")]) == 0
    assert "would free 0.0 MiB in 1 store; --yes does it" in capsys.readouterr().err
    row = answers(capsys, tmp_path)["done"]
    assert (row["pruned"], row["state"]) == (False, "finished")
    assert int(str(row["store_bytes"])) >= STORE_BYTES
    assert folder.servers.is_dir()


def test_the_store_of_a_finished_job_goes_and_everything_else_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ended(tmp_path, "done", End.FINISHED)
    before = files_of(folder)
    assert answers(capsys, tmp_path, "--yes")["done"]["pruned"] is True
    assert files_of(folder) == before - {"servers"}
    assert answers(capsys, tmp_path, "--yes") == {}


@pytest.mark.parametrize("end", [End.FAILED, End.CANCELLED, End.INTERRUPTED, None])
def test_a_job_that_can_be_resumed_keeps_its_store_unless_asked(
    end: End | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ended(tmp_path, "left", end)
    row = answers(capsys, tmp_path, "--yes")["left"]
    assert (row["pruned"], row["note"]) == (False, "it can be resumed; --resumable prunes it too")
    assert folder.servers.is_dir()
    assert answers(capsys, tmp_path, "--yes", "--resumable")["left"]["pruned"] is True
    assert not folder.servers.exists()


def test_the_gates_go_with_the_store_whose_tokens_they_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ended(tmp_path, "done", End.INTERRUPTED)
    path = folder.node(NodeId("n0")) / "gate"
    Gate(path).acquire(Grant(GpuId("n0/0"), Token(1, 57))).close()
    assert answers(capsys, tmp_path, "--yes", "--resumable")["done"]["pruned"] is True
    assert not path.exists()
    Gate(path).acquire(Grant(GpuId("n0/0"), Token(1, 1))).close()


def test_a_job_whose_gpu_is_still_held_keeps_its_store_and_its_gates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ended(tmp_path, "done", End.FINISHED)
    path = folder.node(NodeId("n0")) / "gate"
    hold = Gate(path).acquire(Grant(GpuId("n0/1"), Token(1, 57)))
    row = answers(capsys, tmp_path, "--yes")["done"]
    assert (row["pruned"], "holds n0/1: end it" in str(row["note"])) == (False, True)
    assert folder.servers.is_dir()
    assert Gate(path).highest_token(GpuId("n0/1")) == Token(1, 57)
    hold.close()


def test_a_damaged_gate_keeps_its_job_and_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged, other = ended(tmp_path, "a", End.FINISHED), ended(tmp_path, "b", End.FINISHED)
    path = damaged.node(NodeId("n0")) / "gate"
    Gate(path).acquire(Grant(GpuId("n0/0"), Token(1, 57))).close()
    (record,) = path.glob("*.json")
    record.write_text("{")
    rows = answers(capsys, tmp_path, "--yes")
    assert [rows[job]["pruned"] for job in "ab"] == [False, True]
    assert (damaged.servers.is_dir(), other.servers.exists()) == (True, False)


def test_a_job_that_runs_keeps_its_store_whatever_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ended(tmp_path, "live", End.FINISHED)
    job = load_job(small_config(tmp_path, job="live"))
    with claim_folder(job, Start.FORCE, now_unix_s=0.0):
        folder.servers.mkdir()
        row = answers(capsys, tmp_path, "live", "--yes", "--resumable")["live"]
        assert (row["state"], row["pruned"], row["note"]) == ("live", False, "it runs")
        assert folder.servers.is_dir()


def test_only_named_jobs_are_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, gone = ended(tmp_path, "a", End.FINISHED), ended(tmp_path, "b", End.FINISHED)
    assert list(answers(capsys, tmp_path, "b", "--yes")) == ["b"]
    assert (kept.servers.exists(), gone.servers.exists()) == (True, False)


def test_a_store_whose_job_cannot_be_read_stays_and_the_others_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, copied = ended(tmp_path, "a", End.FINISHED), ended(tmp_path, "b", End.FINISHED)
    broken.result.write_text("{")
    (copied.root / "launcher.lock").unlink()
    gone = ended(tmp_path, "c", End.FINISHED)
    rows = answers(capsys, tmp_path, "--yes", "--resumable")
    assert [rows[job]["pruned"] for job in "abc"] == [False, False, True]
    assert "is not the record of a run" in str(rows["a"]["note"])
    assert "launcher.lock" in str(rows["b"]["note"])
    assert rows["b"]["store_bytes"] is None, "nothing is measured before the lock is held"
    assert (broken.servers.exists(), copied.servers.exists(), gone.servers.exists()) == (True, True, False)


def test_a_removal_that_was_killed_is_ended_by_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ended(tmp_path, "done", End.FINISHED)
    folder.servers.rename(folder.root / "servers.removed")
    assert answers(capsys, tmp_path, "--yes")["done"]["pruned"] is True
    assert "servers.removed" not in files_of(folder)


def test_a_file_that_is_gone_when_it_is_measured_is_skipped() -> None:
    # A listing of /proc/self/fd has the descriptor that reads it, which is closed when the listing ends.
    assert size_bytes(Path("/proc/self/fd")) == 0
