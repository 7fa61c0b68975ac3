"""`tidegate simulate --replay`: a job's recorded events as a table or JSON, and errors for files that are no record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.__main__ import main
from tests.unit.cli.configs import small_config
from tidegate.launcher.event_file import EventFile
from tidegate.v1 import events_pb2

PAGE = Path(__file__).resolve().parents[3] / "docs" / "simulator.md"


def submitted(tmp_path: Path, config_json: str) -> Path:
    """A job's folder with a record of one event."""
    body = events_pb2.JobSubmitted(config_json=config_json)
    event = events_pb2.Event(
        id="launcher/1/1",
        job="small",
        source="launcher",
        boot=1,
        sequence=1,
        occurred_unix_ns=10**18,
        job_submitted=body,
    )
    EventFile(tmp_path / "events.jsonl").append(1, event)
    return tmp_path


def test_the_replay_of_the_page_runs_as_it_stands_there_once_the_demo_has_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = [line for line in PAGE.read_text().splitlines() if "simulate --replay" in line]
    tidegate, *words = line.partition("[")[0].split()
    assert tidegate == "tidegate"
    (tmp_path / "jobs" / "demo").mkdir(parents=True)
    submitted(tmp_path / "jobs" / "demo", small_config(tmp_path).model_dump_json())
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert "dynarl would have changed no assignment" in capsys.readouterr().out


def test_a_record_is_replayed_to_baselines_and_not_to_a_searched_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submitted(tmp_path, small_config(tmp_path).model_dump_json())
    assert main(["simulate", "--replay", str(folder), "--policy", "phases_ordered"]) == 0
    assert capsys.readouterr().out.startswith("phases_ordered would have changed no assignment")
    assert main(["simulate", "--replay", str(folder), "--policy", "best_split"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tidegate: best_split is searched by simulation")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_record_is_replayed_to_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = submitted(tmp_path, small_config(tmp_path).model_dump_json())
    assert main(["simulate", "--replay", str(folder), "--compare", "static,dynarl"]) == 0
    output = capsys.readouterr().out
    assert output == (
        "static would have changed no assignment\ndynarl would have changed no assignment\n\n"
        "small: 1 events, 0 commands to leads under the job's own policy; 0 of 0 answers in the record are to one of "
        "them\n"
    )
    assert main(["simulate", "--replay", str(folder / "events.jsonl"), "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["job"], found["policy"], found["strange"], found["decisions"]) == ("small", "tide", [], [])


WRONG = {
    "a folder without events": (["--replay", "FOLDER/none"], "No such file or directory; name a job's folder"),
    "an empty file": (["--replay", "FOLDER/empty"], "has no events; name a job's folder"),
    "a file that is no record": (
        ["--replay", "FOLDER/text"],
        "text:1 is no event of this release: Expecting value: line 1 column 1 (char 0); replay a job's record by",
    ),
    "a record with a line cut off in the middle": (
        ["--replay", "FOLDER/cut"],
        "cut:2 is no event of this release: Unterminated string starting at: line 1 column 2 (char 1)",
    ),
    "a record of a release that knows more": (
        ["--replay", "FOLDER/newer"],
        'newer:1 is no event of this release: Message type "tidegate.v1.ListEventsResponse" has no field named "mood"',
    ),
    "a policy that is none": (["--replay", "FOLDER", "--policy", "dynar"], "the nearest is 'dynarl'"),
    "a scenario besides": (["x.yaml", "--replay", "FOLDER"], "a job's events have no scenario"),
    "a seed": (["--replay", "FOLDER", "--seed", "3"], "a job's events have no scenario, no seed"),
    "a page": (["--replay", "FOLDER", "-o", "html"], "-o table, json or yaml"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_with_exit_code_2_and_nothing_else(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(tmp_path, small_config(tmp_path).model_dump_json())
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("cluster:\n  nodes: {}\n")
    line = (tmp_path / "events.jsonl").read_text()
    (tmp_path / "cut").write_text(line + '{"stream_sequ\n' + line)
    (tmp_path / "newer").write_text('{"mood": "fine"}\n' + line)
    arguments, want = WRONG[case]
    assert main(["simulate", *(word.replace("FOLDER", str(tmp_path)) for word in arguments)]) == 2
    said = capsys.readouterr()
    assert want in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_record_of_another_release_names_the_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = submitted(tmp_path, '{"job": "small", "nodes": 3}')
    assert main(["simulate", "--replay", str(folder)]) == 2
    assert "event 1, launcher/1/1: JobSubmitted.config_json" in capsys.readouterr().err


def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = submitted(tmp_path, small_config(tmp_path).model_dump_json())
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"stream_sequ')
    assert main(["simulate", "--replay", str(folder)]) == 0
    assert "small: 1 events" in capsys.readouterr().out
