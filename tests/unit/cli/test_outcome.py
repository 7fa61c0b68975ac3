"""The result of a run: its figures, its file, and the times of its iterations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.run_commands import print_tables
from tidegate.job import JobFolder
from tidegate.launcher.outcome import End, Outcome, at_rest
from tidegate.pace.steps import PacedSteps
from tidegate.v1 import control_pb2, types_pb2

WANT_KEYS = [
    "iterations",
    "reward_first",
    "reward_last",
    "samples_generated",
    "samples_trained",
    "samples_filtered",
    "duplicates",
    "lost",
    "failed_rewards",
    "wall_s",
    "timeline",
    "seed",
    "weights_checksum",
    "pace",
]


def row(iteration: int, reward: float, *, incarnation: int = 1) -> control_pb2.IterationSummary:
    return control_pb2.IterationSummary(
        iteration=iteration,
        incarnation=incarnation,
        num_generated=8,
        num_trained=6,
        num_filtered=2,
        metrics={"reward_mean": reward, "num_failed_rewards": 3.0},
    )


def outcome(*rows: control_pb2.IterationSummary) -> Outcome:
    status = control_pb2.GetJobResponse(job="small", iterations=rows, final_checksum="abc")
    return Outcome(End.FINISHED, "done", seed=3, wall_s=1.5, job=status, timeline="t.json", seconds={0: 0.5})


def test_the_summary_adds_up_the_iterations() -> None:
    summary = outcome(row(0, 0.25), row(1, 0.75)).summary()
    assert list(summary) == WANT_KEYS
    assert (summary["iterations"], summary["reward_first"], summary["reward_last"]) == (2, 0.25, 0.75)
    assert (summary["samples_generated"], summary["samples_trained"], summary["samples_filtered"]) == (16, 12, 4)
    assert (summary["failed_rewards"], summary["weights_checksum"]) == (6, "abc")


def test_an_iteration_done_again_after_a_restart_counts_once_by_its_later_account() -> None:
    summary = outcome(row(0, 0.1), row(1, 0.2), row(1, 0.9, incarnation=2)).summary()
    assert (summary["iterations"], summary["reward_last"], summary["samples_generated"]) == (2, 0.9, 16)


def test_a_job_whose_processes_are_gone_has_no_gpu_and_keeps_its_figures() -> None:
    report = outcome(row(0, 0.25)).job
    actor = report.components.add(role=types_pb2.ROLE_ACTOR, state="up", lead="actor@n0")
    actor.layout.dp = 2
    actor.grants.add(gpu="n0/0")
    left = at_rest(report)
    assert list(left.components) == [
        control_pb2.ComponentStatus(role=types_pb2.ROLE_ACTOR, state="down", lead="actor@n0")
    ]
    assert left.iterations == report.iterations
    assert report.components[0].state == "up", "the report itself stays as it was"


def test_a_run_without_iterations_has_no_reward() -> None:
    summary = outcome().summary()
    assert list(summary) == WANT_KEYS
    assert (summary["iterations"], summary["reward_first"], summary["reward_last"]) == (0, None, None)


def test_the_result_file_has_the_whole_outcome(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    written = outcome(row(0, 0.25))
    written.write(path)
    assert Outcome.read(path) == written


def test_a_void_run_is_told_in_the_result_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    written = replace(outcome(row(0, 0.25)), pace=PacedSteps(num_steps=1000, num_late=11, num_cores=0.5))
    written.write(path)
    want = {"num_steps": 1000, "num_late": 11, "num_cores": 0.5, "is_void": True}
    assert json.loads(path.read_text())["summary"]["pace"] == want
    assert Outcome.read(path) == written


@pytest.mark.parametrize("text", ["", "[]", '{"end": "finished"}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not the record of a run"):
        Outcome.read(path)


def test_the_tables_of_a_run_have_the_seconds_of_its_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_tables(outcome(row(0, 0.25)), JobFolder(tmp_path / "small"))
    header, values = capsys.readouterr().out.splitlines()[:2]
    assert values[: header.index("SECONDS") + len("SECONDS")].endswith(" 0.5")
