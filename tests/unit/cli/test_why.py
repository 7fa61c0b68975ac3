"""`tidegate why`: a decision with its inputs, its alternatives and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from tests.unit.cli.moving_jobs import decision, moved_job, resize, step
from tidegate.moves_log import MovesLog

OUTCOME = {
    "forecast_s": 4.0,
    "actual_s": 4.5,
    "late_s": 0.5,
    "best_other_s": 6.5,
    "gain_forecast_s": 2.5,
    "gain_actual_s": 2.0,
}


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main(["why", "small", "--output-dir", str(folder), "-o", "json", *flags]) == 0
    return list(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    "flags", [["--transition", "t4"], ["--transition", "small/1/t4"], ["--gpu", "1"], ["--iteration", "0"]]
)
def test_a_decision_is_found_by_its_transition_its_gpu_or_its_iteration(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = asked(moved_job(tmp_path).root.parent, capsys, *flags)
    assert row["outcome"] == OUTCOME
    assert [each["what"] for each in row["alternatives"]] == [
        "the trainer starts in 0 s on 2 GPUs",
        "the trainer stays on 1 GPU",
    ]
    (move,) = row["moves"]
    assert move["seconds"] == 0.5
    assert move["steps"] == [{"s": 0.01, "acquiring": 1}, {"s": 0.4, "committed": 1}]


def test_a_person_reads_what_was_seen_weighed_chosen_and_gained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "small", "--output-dir", str(moved_job(tmp_path).root.parent)]) == 0
    out = capsys.readouterr().out
    for want in (
        "iteration 0: tide: minibatch 0 is next",
        "saw: 12 of 64 sequences unfinished, 7 of 16 groups ready, 1 of 4 minibatches done, 1234 tokens/s",
        "the trainer stays on 1 GPU",
        "move small/1/t4: actor resize +n0/1: committed in 0.50 s",
        "ended 4.5 s later, forecast 4.0 s; the best other way was forecast to take 6.5 s: it gained 2.0 s",
        "move small/1/t5: actor resize -n0/2: is open",
    ):
        assert want in out
    assert out.count("what came of it") == 1, "the second decision's iteration is not over"


def test_a_change_of_layout_alone_is_told_by_its_layout_and_the_states_of_its_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = moved_job(tmp_path)
    alone = decision(6000, 1, resize("t6", comes=[], leaves=[]))
    MovesLog(folder.moves).append([alone, step(6040, "t6", planned=[]), step(6450, "t6", committed=[])])
    assert main(["why", "small", "--output-dir", str(folder.root.parent), "--transition", "t6"]) == 0
    out = capsys.readouterr().out
    assert "move small/1/t6: actor resize to dp2: is open" in out
    assert "planned at 0.04 s, committed at 0.45 s" in out


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--gpu", "9"], "GPU '9' is not one of the job's; name one of n0/0, n0/1, n0/2"),
        (["--gpu", "n0/0"], "no decision on record moved GPU n0/0"),
        (["--transition", "t9"], "no transition 't9' is on record; the last ones: small/1/t5, small/1/t4"),
        (["--iteration", "7"], "no decision of iteration 7 is on record; there are iterations 0 to 1"),
        (["--iteration", "x"], "'x' is not a whole number"),
        (["--gpu", "1", "--iteration", "0"], "not allowed with argument"),
    ],
)
def test_a_question_that_names_nothing_of_the_job_is_bad_usage(
    flags: list[str], want: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "small", "--output-dir", str(moved_job(tmp_path).root.parent), *flags]) == 2
    said = capsys.readouterr().err
    assert want in said
    assert len(said.splitlines()) == 1


def test_a_job_without_a_record_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = moved_job(tmp_path)
    folder.moves.unlink()
    assert main(["why", "small", "--output-dir", str(folder.root.parent)]) == 0
    assert capsys.readouterr().out == "job small: no decision is on record yet\n"
    assert asked(folder.root.parent, capsys) == []
