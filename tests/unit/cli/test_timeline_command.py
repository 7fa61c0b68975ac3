"""`tidegate timeline` of a finished job, of one that runs, and of none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.__main__ import main
from tests.unit.cli.moving_jobs import moved_job


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["timeline", *arguments]) == 0
    return capsys.readouterr().out


def test_all_forms_show_the_same_spans_and_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["small", "--output-dir", str(moved_job(tmp_path).root.parent)]
    value = json.loads(said(capsys, *where, "-o", "json"))
    trace = json.loads(said(capsys, *where))
    page = said(capsys, *where, "-o", "html")

    busy = value["gpus"][0]["spans"][1]
    assert busy == {"start_s": 1.0, "end_s": 4.0, "state": "training", "iteration": 0}
    spans = [event for event in trace["traceEvents"] if event["name"] == "training"]
    assert [(each["ts"], each["dur"], each["args"]) for each in spans] == [(1e6, 3e6, {"iteration": 0})]
    marks = [(mark["at_s"], mark["what"]) for mark in value["marks"]]
    assert marks == [(0.2, "decision"), (4.7, "iteration ends"), (5.2, "decision")]
    assert sorted(event["ts"] / 1e6 for event in trace["traceEvents"] if event["ph"] == "i") == [0.2, 4.7, 5.2]
    assert "tide: minibatch 0 is next" in page
    assert '"training"' in page
    assert [row["transition"] for row in value["moves"]] == ["small/1/t4", "small/1/t5"]


def test_all_forms_tell_by_how_much_other_machines_times_may_be_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = moved_job(tmp_path)
    path = folder.attempt().trace
    trace = json.loads(path.read_text())
    trace["otherData"]["clock_error_ns"] = {"n1": 1_600_000, "n2": None}
    path.write_text(json.dumps(trace))
    where = ["small", "--output-dir", str(folder.root.parent)]
    assert json.loads(said(capsys, *where, "-o", "json"))["clock_error_s"] == {"n1": 0.0016, "n2": None}
    assert json.loads(said(capsys, *where))["otherData"]["clock_error_ns"] == {"n1": 1_600_000, "n2": None}
    page = said(capsys, *where, "-o", "html")
    assert "times of other machines within 1.6 ms; the clocks of n2 are not known" in page


def test_the_states_of_each_slot_add_up_to_the_wall_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = moved_job(tmp_path)
    value = json.loads(said(capsys, "small", "--output-dir", str(folder.root.parent), "-o", "json"))
    assert value["wall_s"] == 8.0
    assert [sum(gpu["state_s"].values()) for gpu in value["gpus"]] == [8.0] * 3


def test_a_job_without_a_merged_timeline_shows_the_spans_that_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = moved_job(tmp_path)
    folder.attempt().trace.unlink()
    value = json.loads(said(capsys, "small", "--output-dir", str(folder.root.parent), "-o", "json"))
    assert value["wall_s"] == 3.0
    assert [gpu["state_s"] for gpu in value["gpus"]] == [{"training": 3.0}, {"free": 3.0}, {"free": 3.0}]


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["small", "--attempt", "7"], "job small has no attempt 7; there are 1"),
        (["other"], "no job 'other'"),
        (["small", "-o", "htm"], "'htm' is not one of perfetto, html, json; the nearest is 'html'"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    arguments: list[str], want: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", *arguments, "--output-dir", str(moved_job(tmp_path).root.parent)]) == 2
    assert want in capsys.readouterr().err
