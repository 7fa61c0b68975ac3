"""What the commands read of a job's log of moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from cli.moves import of_lines
from tests.unit.cli.moving_jobs import LINES, closed, decision, iteration, moved_job, resize


def test_a_line_of_another_form_is_left_out_and_the_others_count() -> None:
    odd: list[dict[str, Any]] = [
        {"kind": "decision", "at_ms": 1},
        {"kind": "step", "at_ms": "x"},
        {"kind": "new", "at_ms": 3},
    ]
    found = of_lines([*odd, *LINES])
    assert [each.transition for each in found.moves] == ["small/1/t4", "small/1/t5"]


def test_a_runs_figures_count_committed_moves_and_their_seconds() -> None:
    more = [decision(6000, 1, resize("t6", comes=["n0/2"], leaves=[])), closed(7500, "t6", "committed")]
    more += [decision(8000, 1, resize("t7", comes=["n0/2"], leaves=[])), closed(8100, "t7", "aborted")]
    found = of_lines([*LINES, *more])
    assert found.summary() == {"moves": 2, "switch_s": 2.0, "switch_s_median": 1.0}
    assert of_lines([]).summary() == {"moves": 0, "switch_s": 0, "switch_s_median": None}


@pytest.mark.parametrize("outcome", ["aborted", "partial", "committed"])
def test_a_move_that_the_jobs_end_cut_short_is_told_as_that_and_no_failure(outcome: str) -> None:
    home = decision(6000, 1, resize("t6", comes=[], leaves=["n0/2"]))
    for ends, want in ((False, outcome), (True, "committed" if outcome == "committed" else "cut by the job's end")):
        found = of_lines([home, closed(6500, "t6", outcome) | {"job_ends": ends}])
        assert found.moves[0].row()["outcome"] == want
    assert of_lines([home, closed(6500, "t6", outcome)]).moves[0].outcome == outcome, "a log of an earlier release"


def test_the_end_of_a_job_that_fails_in_an_iteration_is_no_move() -> None:
    stop = resize("t6", comes=[], leaves=["n0/2"]) | {"change": "stop"}
    start = resize("t7", comes=["n0/2"], leaves=[]) | {"change": "start"}
    found = of_lines([decision(6000, 1, stop, start), closed(6500, "t6", "committed"), closed(7000, "t7", "committed")])
    assert [(each.change, each.is_move) for each in found.moves] == [("stop", False), ("start", True)]
    assert found.summary()["moves"] == 1


def test_a_move_between_two_iterations_counts_in_the_row_of_the_first() -> None:
    between = decision(6000, 0, resize("t6", comes=["n0/2"], leaves=[])) | {"iteration": None}
    later = decision(8000, 2, resize("t7", comes=["n0/2"], leaves=[]))
    found = of_lines(
        [
            *LINES,
            between,
            closed(7500, "t6", "committed"),
            iteration("opened", 7600, 2),
            later,
            closed(8200, "t7", "committed"),
        ]
    )
    rows = [found.summary(number) for number in (0, 1, 2)]
    assert [(row["moves"], row["switch_s"]) for row in rows] == [(1, 0.5), (1, 1.5), (1, 0.2)]
    assert found.summary()["moves"] == 3


def test_a_decision_that_a_second_replica_wrote_again_is_one_move() -> None:
    assert len(of_lines([*LINES, LINES[1]]).moves) == 2


def test_describe_shows_the_last_moves_and_the_seconds_of_an_iterations_switches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--output-dir", str(moved_job(tmp_path).root.parent)]
    assert main(["describe", "small", *where]) == 0
    out = capsys.readouterr().out
    assert "MOVES  SWITCH S" in out
    assert "small/1/t4" in out
    assert "1 move in 0.5 s of switches, median 0.50 s" in out
    assert main(["describe", "small", *where, "-o", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["moves"]["switch_s"] == 0.5
    assert [(row["moves"], row["switch_s"]) for row in value["iterations"]] == [(1, 0.5)]
