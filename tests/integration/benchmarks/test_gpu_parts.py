"""The parts of `make gpu` at the tiny sizes that a CPU runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import cluster, deaths, demo, doctor, marked_tests, reshard, sglang, snapshot
from benchmarks.gpu.report import PartReport, Skipped


@pytest.fixture
def report(tmp_path: Path) -> PartReport:
    return PartReport(tmp_path / "report.json")


def test_the_doctor_measures_copies_and_says_what_is_missing(report: PartReport) -> None:
    doctor.measure("cpu", report)
    assert report.figures["host_to_device_bytes_per_s"] > 0
    assert report.figures["device_to_device_bytes_per_s"] > 0
    assert isinstance(report.figures["missing"], list)
    assert PartReport.read(report.path).figures == report.figures


@pytest.mark.long
def test_the_weights_come_back_from_a_snapshot_with_their_times(report: PartReport) -> None:
    snapshot.measure("cpu", report)
    assert report.figures["size_bytes"] > 1 << 20
    assert all(report.figures[f"{step}_bytes_per_s"] > 0 for step in ("publish", "read", "to_device"))
    for step, copy in (("publish", "device_to_host"), ("to_device", "host_to_device")):
        want = report.figures[f"{step}_bytes_per_s"] / report.figures[f"{copy}_bytes_per_s"]
        assert report.figures[f"{step}_share_of_copy_rate"] == pytest.approx(want)
    assert report.figures["backend"] == "gloo"


# Two trees of four ranks each write and read torch's checkpoint twice.
@pytest.mark.long
def test_both_sides_of_a_reshard_keep_every_element_and_tell_their_times(report: PartReport) -> None:
    reshard.measure("cpu", report)
    ours, theirs = (report.figures[f"{side}, dp4 to tp2-dp2"] for side in ("tidegate", "dcp"))
    assert ours["moved_bytes"] > 1 << 20
    assert ours["parts_s"]["certificate"] > 0
    assert ours["share_of_copy_rate"] > 0
    assert set(theirs["parts_s"]) == {"save", "groups", "build", "load"}


@pytest.mark.long
def test_the_demo_runs_to_its_end_and_loses_nothing(report: PartReport) -> None:
    demo.measure("cpu", report)
    assert report.figures["iterations"] == 2
    assert report.figures["samples_trained"] == report.figures["samples_generated"] == 256
    assert report.figures["slot_seconds_by_state"]["training"] > 0
    assert json.loads((report.kept / "tide.timeline.json").read_text())["traceEvents"]


@pytest.mark.long
def test_a_job_goes_on_after_each_kill_and_loses_nothing(report: PartReport) -> None:
    deaths.measure("cpu", report)
    assert set(report.figures["recovery_s"]) == {"rollout engine", "actor rank"}
    assert report.figures["samples_trained"] == report.figures["samples_generated"] == 384


@pytest.mark.long
def test_a_cluster_runs_two_jobs_and_then_the_third(report: PartReport) -> None:
    cluster.measure("cpu", report)
    assert set(report.figures["first_iteration_s"]) == {"one", "two", "late"}
    assert len(report.figures["weights_checksums"]) == 1


@pytest.mark.long
def test_a_demo_that_does_not_start_fails_the_part(report: PartReport) -> None:
    with pytest.raises(RuntimeError, match="the demo ended with"):
        demo.run_demo("tide", ["algorithm.iterations=0"], report)


def test_a_run_of_tests_counts_them_and_names_those_that_fail(report: PartReport, tmp_path: Path) -> None:
    tests = tmp_path / "test_three.py"
    tests.write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert False\n"
        "def test_elsewhere(): pytest.skip('not here')\n"
    )
    with pytest.raises(RuntimeError, match="pytest ended with 1, failed tests: test_bad"):
        marked_tests.run_tests((str(tests),), report)
    assert report.figures == {
        "num_passed": 1,
        "num_failed": 1,
        "num_skipped": 1,
        "failed": ["test_bad"],
        "skipped": ["test_elsewhere"],
    }


def test_without_sglang_its_part_is_skipped_with_the_remedy(
    report: PartReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PYTHON", raising=False)
    with pytest.raises(Skipped, match="SGLANG_PYTHON=PATH make gpu"):
        sglang.measure("cpu", report)
