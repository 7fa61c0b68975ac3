"""The command as a user sees it: exit codes, messages for people, one form for people and one for programs."""

from __future__ import annotations

import errno
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.json_format import MessageToDict

from cli import jobs
from cli.__main__ import main
from cli.command import execute
from cli.doctor import Health, examine, host_memory
from cli.run_commands import exit_code
from tests.unit.cli.configs import small_config, small_file
from tidegate.codec import encode_layout
from tidegate.config.files import load_config
from tidegate.job import JobFolder
from tidegate.launcher.claim import write_private
from tidegate.launcher.outcome import End, Outcome
from tidegate.types import Layout
from tidegate.v1 import control_pb2, events_pb2, types_pb2

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The output folder of a finished job."""
    config = small_config(tmp_path)
    folder = JobFolder.of(config)
    folder.attempt().logs.mkdir(parents=True)
    write_private(folder.config, config.to_json())
    status = control_pb2.GetJobResponse(job="small", iteration=1, num_iterations=1, incarnation=1)
    status.components.add(role=types_pb2.ROLE_ACTOR, state="down", lead="actor@n0")
    metrics = {"reward_mean": 0.5, "loss": 0.1} | dict.fromkeys(jobs.LEARNING_RATE, 0.0)
    metrics |= {
        "lr": 1e-4,
        "lr_progress": 8429.5,
        "lr_budget": 2400.0,
        "lr_overshoot": 6029.5,
        "lr_updates": 12345678.0,
    }
    status.iterations.add(iteration=0, num_generated=4, num_trained=4, metrics=metrics)
    status.evaluations.add(version=1, num_prompts=8, samples_per_prompt=2, metrics={"countdown/pass@2": 0.25})
    Outcome(End.FINISHED, "all done", seed=0, wall_s=2.0, job=status, seconds={0: 1.25}).write(folder.result)
    event = control_pb2.ListEventsResponse(
        stream_sequence=1,
        event=events_pb2.Event(
            id="actor@n0/1/1",
            source="actor@n0",
            role=types_pb2.ROLE_ACTOR,
            progress=events_pb2.Progress(phase="train", num_done=1, num_total=4),
        ),
    )
    folder.events.write_text(json.dumps(MessageToDict(event, preserving_proto_field_name=True)) + "\n")
    for source, second in (("actor@n0", 2), ("scheduler", 1)):
        line = {
            "time": f"2026-01-01T00:00:0{second}Z",
            "level": "info",
            "source": source,
            "event": "serving",
            "boot": 1,
        }
        (folder.attempt().logs / f"{source}.jsonl").write_text(json.dumps(line) + "\n")
    return folder.root.parent


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key names the nearest": ({"sed": 1}, "unknown key 'sed'; the nearest known key is 'seed'"),
    "a GPU listed twice": (
        {"cluster": {"nodes": {"n0": 3}, "component_placement": {"actor": 0, "rollout": 0, "inference": 2}}},
        "names GPU 0, which actor has already",
    ),
    "a layout that the model does not fit gives the equation and the legal ones": (
        {
            "cluster": {"nodes": {"n0": 6}, "component_placement": {"actor": "0-3", "rollout": 4, "inference": 5}},
            "actor": {"learning_rate": 1e-3, "layout": {"tp": 4}},
        },
        "num_heads % tp = 2 % 4 = 2, must be 0; legal tp: 1, 2",
    ),
    "an unknown task": ({"task": {"name": "chess"}}, "no task is called 'chess'; known tasks: countdown"),
    "a URL that is none": ({"servers": {"nats_url": "localhost:4222"}}, "is not a URL like nats://host:port"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_ends_with_exit_code_2_and_starts_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, want = WRONG[case]
    assert main(["run", str(small_file(tmp_path, **changes))]) == 2
    said = capsys.readouterr()
    assert want in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not (tmp_path / "jobs").exists()


def test_a_tokenizer_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_file(tmp_path)
    path.write_text(path.read_text().replace("max_seq_len: 80", "max_seq_len: 80\n  tokenizer: words.json"))
    assert main(["run", str(path)]) == 2
    assert f"no tokenizer at {tmp_path / 'words.json'}" in capsys.readouterr().err


def test_a_config_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml: No such file or directory" in capsys.readouterr().err


def test_resume_and_force_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(small_file(tmp_path)), "--resume", "--force"]) == 2
    assert "give only one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ([], "the following arguments are required: COMMAND; `tidegate --help` lists the"),
        (
            ["simulat"],
            "COMMAND: 'simulat' is not one of demo, run, .*; the nearest is 'simulate'; `tidegate --help` lists the",
        ),
        (
            ["get", "cakes"],
            "what: 'cakes' is not one of jobs, evaluations, gpus, nodes, deadletters; `tidegate get --help` lists the",
        ),
        (["deadletter", "drop", "small", "x"], "ID: invalid int value: 'x'; `tidegate deadletter --help` lists the"),
        (["get", "jobs", "-o", "xml"], "-o: 'xml' is not one of table, json, yaml; `tidegate get --help` lists the"),
        (
            ["plan", "a.yaml", "-o", "svg"],
            "-o: 'svg' is not one of table, json, yaml; `tidegate plan --help` lists",
        ),
        (["get"], "the following arguments are required: what; `tidegate get --help` lists the"),
        (["submit", "a.yaml", "--from-afar"], "--from-afar is for a job that another machine has sent: leave it out"),
        (["plan"], "the following arguments are required: CONFIG | key=value; `tidegate plan --help` lists the"),
        (
            ["calibrate", "a", "-o", "yml"],
            "-o: 'yml' is not one of yaml, table, json; the nearest is 'yaml'; `tidegate",
        ),
        (
            ["demo", "--seed", "-1"],
            "--seed: '-1' is not a whole number from 0 to 4294967295; `tidegate demo --help` lists the",
        ),
        (["describe", "small", "seed=1"], "describe takes no seed=1; `tidegate describe --help` lists the"),
        (["run", "a.yaml", "--fast"], "run takes no --fast; `tidegate run --help` lists the"),
        (["events", "a", "--since", "5"], "--since: '5' is not an age such as 30s, 5m, 2h or 1d; `tidegate events"),
        (["logs", "a", "--tail", "-1"], "--tail: '-1' is not a whole number of rows; `tidegate logs --help` lists"),
        (["events", "a", "--type", "faild"], "--type: 'faild' is not one of .*; the nearest is 'failed'; `tidegate"),
        (
            ["logs", "a", "--follow", "--attempt", "1"],
            "--attempt: not allowed with argument -f/--follow; `tidegate logs",
        ),
    ],
)
def test_wrong_usage_is_one_line_with_its_remedy_and_ends_with_2(
    arguments: list[str], want: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert re.match(rf"tidegate: {re.escape(want).replace(re.escape('.*'), '.*')}", said.err)
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_help_is_on_stdout_and_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: tidegate simulate ")


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ("tp", "tp='' is not a whole number from 1 to 65,536"),
        ("tp=two", "tp='two' is not a whole number from 1 to 65,536"),
        ("tp=1_0", "tp='1_0' is not a whole number from 1 to 65,536"),
        ("tp=99999", "tp='99999' is not a whole number from 1 to 65,536"),
        ("tp=9999999999", "tp='9999999999' is not a whole number from 1 to 65,536"),
        ("tp=0", "tp='0' is not a whole number from 1 to 65,536"),
        ("xp=2", "'xp' is no axis"),
        ("", "'' is no axis"),
        ("tp=2,tp=4", "tp is named twice"),
        ("vpp=2", "layout vpp=2 with pp=1: Megatron interleaves stages only; set vpp to 1 or pp > 1"),
    ],
)
def test_a_wrong_layout_is_refused_with_the_list_of_axes(
    layout: str, want: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "small", "--layout", layout]) == 2
    wrong = (
        f"tidegate: --layout: '{layout}' is no layout such as tp=2,dp=2, of tp, pp, dp, cp, ep, vpp: {want}; `tidegate"
    )
    said = capsys.readouterr().err
    assert said.startswith(wrong)
    assert said.count("\n") == 1


@pytest.mark.parametrize("gpus", ["", "n0", "n0/", "n0/x", "n0/0,,n0/1", "n0/0, n0/1"])
def test_a_wrong_list_of_gpus_is_refused_with_an_example(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "small", "--layout", "dp=2", "--gpus", gpus]) == 2
    said = capsys.readouterr().err
    assert re.match(r"tidegate: --gpus: '.*' is no GPU such as n0/0: `tidegate get gpus` lists them; ", said)
    assert said.count("\n") == 1


def test_an_unknown_job_is_refused_with_the_list_of_jobs(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "smal", "--output-dir", str(finished)]) == 2
    assert "no job 'smal'" in (said := capsys.readouterr().err)
    assert "there: small" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["cancel", "small"],
        ["get", "gpus", "small"],
        ["deadletter", "drop", "small", "1"],
        ["scale", "small", "--layout", "tp=2"],
    ],
)
def test_commands_to_a_finished_job_fail_with_1(
    arguments: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output-dir", str(finished)]) == 1
    assert "job small is finished; only a running job" in capsys.readouterr().err


def test_a_component_shows_every_axis_of_its_layout() -> None:
    layout = encode_layout(Layout(tp=2, pp=2, cp=2, ep=2, vpp=2))
    actor = control_pb2.ComponentStatus(role=types_pb2.ROLE_ACTOR, layout=layout)
    (row,) = jobs.component_rows(control_pb2.GetJobResponse(components=[actor]))
    assert row["layout"] == "tp2-pp2-cp2-ep2-vpp2"


def test_an_endpoint_without_a_server_is_reported_as_a_killed_run(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "small" / "result.json").unlink()
    (finished / "small" / "endpoint.json").write_text('{"control": "127.0.0.1:1", "pid": 1, "credential": "gone"}')
    assert main(["describe", "small", "--output-dir", str(finished)]) == 1
    assert "its run was killed" in capsys.readouterr().err
    assert (
        json.loads(answer(capsys, "get", "jobs", "-o", "json", "--output-dir", str(finished)))[0]["state"] == "killed"
    )


def test_jobs_are_listed_in_both_forms(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(answer(capsys, "get", "jobs", "-o", "json", "--output-dir", str(finished)))
    want = {"job": "small", "state": "finished", "iteration": 1, "iterations": 1, "reward": 0.5, "message": "all done"}
    assert rows == [want]
    head, line = answer(capsys, "get", "jobs", "--output-dir", str(finished)).splitlines()
    assert head.split() == ["JOB", "STATE", "ITERATION", "ITERATIONS", "REWARD", "MESSAGE"]
    assert line.split() == ["small", "finished", "1", "1", "0.5", "all", "done"]


@pytest.mark.parametrize(
    "words",
    [
        "get jobs",
        "get evaluations",
        "get gpus",
        "get deadletters",
        "describe small",
        "events small",
        "logs small actor@n0",
        "prune",
    ],
)
def test_yaml_holds_the_same_as_json(words: str, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--output-dir", str(finished))
    as_yaml = yaml.safe_load(answer(capsys, *words.split(), "-o", "yaml", *where))
    assert as_yaml == json.loads(answer(capsys, *words.split(), "-o", "json", *where))


def test_events_and_logs_are_one_document_of_yaml_each(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "logs", "small", "-o", "yaml", "--output-dir", str(finished))
    assert [line["source"] for line in yaml.safe_load_all(text)] == ["scheduler", "actor@n0"]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"tidegate {version('tidegate')}\n"


def test_means_in_json_are_rounded_and_counts_and_rates_are_not(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome.read(result := finished / "small" / "result.json")
    metrics = {"reward_mean": 1 / 3, "loss": -1e-7 / 3, "response_tokens_mean": 1234567.8, "lr": 1e-4 / 3}
    outcome.job.iterations[0].metrics.update(metrics)
    outcome.job.evaluations[0].metrics["countdown/pass@2"] = 2 / 3
    outcome.write(result)
    described = json.loads(answer(capsys, "describe", "small", "-o", "json", "--output-dir", str(finished)))
    iteration = described["iterations"][0]
    assert (iteration["reward_mean"], iteration["loss"]) == (0.333333, -3.33333e-08)
    assert (iteration["response_tokens_mean"], iteration["lr"]) == (1234568.0, 1e-4 / 3)
    assert described["evaluations"][0]["countdown/pass@2"] == 0.666667
    assert (described["summary"]["reward_last"], described["summary"]["wall_s"]) == (0.333333, 2.0)


def test_evaluations_are_listed_with_every_figure_that_a_job_has(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(answer(capsys, "get", "evaluations", "-o", "json", "--output-dir", str(finished)))
    assert rows == [{"job": "small", "version": 1, "prompts": 8, "samples_per_prompt": 2, "countdown/pass@2": 0.25}]
    head, line = answer(capsys, "get", "evaluations", "small", "--output-dir", str(finished)).splitlines()
    assert head.split() == ["JOB", "VERSION", "PROMPTS", "SAMPLES", "PER", "PROMPT", "COUNTDOWN/PASS@2"]
    assert line.split() == ["small", "1", "8", "2", "0.25"]


def test_an_empty_folder_says_so_and_is_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "get", "jobs", "--output-dir", str(tmp_path)) == f"no jobs in {tmp_path}\n"
    assert json.loads(answer(capsys, "get", "gpus", "-o", "json", "--output-dir", str(tmp_path))) == []


def test_a_folder_that_is_not_there_is_named_with_its_whole_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["get", "jobs", "--output-dir", "nosuch"]) == 2
    assert f"there is no folder {tmp_path / 'nosuch'}" in capsys.readouterr().err


def test_following_a_finished_job_ends_with_its_end_line(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("events", "logs"):
        assert main([command, "small", "--follow", "--output-dir", str(finished)]) == 0
        assert capsys.readouterr().err == "job small finished: all done\n"


def test_a_finished_job_is_described_from_its_folder(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = json.loads(answer(capsys, "describe", "small", "-o", "json", "--output-dir", str(finished)))
    assert described["state"] == "finished"
    assert described["summary"]["samples_trained"] == 4
    assert described["iterations"][0]["seconds"] == 1.25
    assert described["evaluations"][0]["countdown/pass@2"] == 0.25
    text = answer(capsys, "describe", "small", "--output-dir", str(finished))
    assert text.startswith("job small: finished (all done)")
    assert "actor@n0" in text
    assert "COUNTDOWN/PASS@2" in text
    assert described["iterations"][0]["lr_overshoot"] == 6029.5
    assert (
        "learning rate: 0.0001 in the last update; 8429.5 of 2400 steps done, 12345678 updates for 0 nominal, "
        "0 skipped, 0 steps short, 6029.5 beyond the budget"
    ) in text


def test_a_finished_jobs_events_are_read_from_its_folder(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads(answer(capsys, "events", "small", "-o", "json", "--output-dir", str(finished)))
    assert row["event"]["progress"]["phase"] == "train"
    assert "train 1/4" in answer(capsys, "events", "small", "--output-dir", str(finished))


def test_of_events_and_logs_only_those_asked_for_are_shown(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--output-dir", str(finished))
    assert answer(capsys, "events", "small", "--type", "failed", *where) == ""
    assert "train 1/4" in answer(capsys, "events", "small", "--type", "failed", "--type", "progress", *where)
    assert answer(capsys, "events", "small", "--since", "5m", *where) == ""
    assert answer(capsys, "logs", "small", "--since", "1d", *where) == ""
    tail = answer(capsys, "logs", "small", "--tail", "1", *where)
    assert tail == "2026-01-01T00:00:02Z  info  actor@n0  serving  boot=1\n"
    assert answer(capsys, "logs", "small", "--attempt", "1", "--tail", "1", *where) == tail


def test_logs_of_all_sources_come_in_order_of_time(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = answer(capsys, "logs", "small", "-o", "json", "--output-dir", str(finished)).splitlines()
    assert [json.loads(line)["source"] for line in lines] == ["scheduler", "actor@n0"]
    one = answer(capsys, "logs", "small", "actor@n0", "--output-dir", str(finished))
    assert answer(capsys, "logs", "small", "--output-dir", str(finished), "actor@n0") == one
    assert one == "2026-01-01T00:00:02Z  info  actor@n0  serving  boot=1\n"
    assert main(["logs", "small", "actor@n9", "--output-dir", str(finished)]) == 2
    assert "there are actor@n0, scheduler" in capsys.readouterr().err


@pytest.mark.usefixtures("torch_is_asked_once")
def test_doctor_finds_this_machine_fit_and_gives_a_remedy_for_each_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(answer(capsys, "doctor", "-o", "json"))
    assert {row["health"] for row in rows} <= {"ok", "warn"}
    assert {"embedded nats-server", "embedded valkey", "open files", "cores"} <= {row["check"] for row in rows}
    bad = host_memory(tmp_path / "nowhere")
    assert (bad.health, bool(bad.remedy)) == (Health.BAD, True)
    assert all(finding.remedy for finding in examine() if finding.health is not Health.OK)


@pytest.mark.parametrize(("end", "want"), [("finished", 0), ("failed", 1), ("cancelled", 1), ("interrupted", 1)])
def test_the_exit_code_tells_how_a_run_ended(end: str, want: int) -> None:
    assert exit_code(Outcome(End(end), "", seed=0, wall_s=0.0, job=control_pb2.GetJobResponse())) == want


def test_the_demo_and_the_example_are_valid_configs() -> None:
    for path in ("tidegate/demo.yaml", "examples/grpo.yaml"):
        config = load_config(REPOSITORY / path)
        assert config.algorithm.max_new_tokens < config.model.max_seq_len


def test_the_job_of_another_user_is_refused_in_one_line(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Path.open

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        """As for who is not root."""
        if finished in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", opened)
    assert execute(["describe", "small", "--output-dir", str(finished)]) == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    assert line.startswith(f"tidegate: [Errno {errno.EACCES}] Permission denied: '{finished}/small/")
    assert line.endswith("': call the command as the user whose it is, or name another path")
