"""The output while a job runs: JSON lines without a terminal, bars on one. Neither ever ends a run."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cli.rows import MOST_ROWS, cut_table, table
from cli.views import LinesView, OpenView, TerminalView, UnfailingStream, make_view
from tidegate.v1 import control_pb2, events_pb2, types_pb2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedTerminal(Terminal):
    """A terminal after a SIGHUP: every write fails."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def progress(num_done: int) -> events_pb2.Event:
    body = events_pb2.Progress(phase="generate", num_done=num_done, num_total=4, metrics={"num_tokens": 12.5})
    return events_pb2.Event(role=types_pb2.ROLE_ROLLOUT, source="rollout@n0", iteration=2, progress=body)


def reported() -> events_pb2.Event:
    body = events_pb2.IterationReported(metrics={"reward_mean": 0.75, "loss": -0.01, "num_failed_rewards": 5})
    body.trained.num_samples = 8
    return events_pb2.Event(role=types_pb2.ROLE_ACTOR, source="actor@n0", iteration=2, iteration_reported=body)


def failed() -> events_pb2.Event:
    return events_pb2.Event(source="rollout@n0", failed=events_pb2.Failed(exit_status=-9))


def resized() -> events_pb2.Event:
    report = types_pb2.ReshardReport(
        source=types_pb2.Layout(tp=2, dp=2), target=types_pb2.Layout(tp=2), moved_bytes=640, seconds={"transfer": 0.25}
    )
    grants = [types_pb2.Grant(gpu="n0/1"), types_pb2.Grant(gpu="n0/0")]
    body = events_pb2.LayoutCommitted(grants=grants, reshard=report)
    return events_pb2.Event(role=types_pb2.ROLE_ACTOR, source="actor@n0", layout_committed=body)


def committed(source: types_pb2.Layout, target: types_pb2.Layout, *, num_dead: int) -> events_pb2.Event:
    report = types_pb2.ReshardReport(source=source, target=target, moved_bytes=640, seconds={"transfer": 0.25})
    grants = [types_pb2.Grant(gpu="n0/1"), types_pb2.Grant(gpu="n0/0")]
    body = events_pb2.LayoutCommitted(grants=grants, reshard=report, num_dead=num_dead)
    return events_pb2.Event(role=types_pb2.ROLE_ACTOR, source="actor@n0", layout_committed=body)


def not_resized() -> events_pb2.Event:
    return events_pb2.Event(source="actor@n0", resize_failed=events_pb2.ResizeFailed(message="no memory"))


def evaluated() -> events_pb2.Event:
    body = events_pb2.EvaluationReported(version=2, metrics={"reward_mean": 0.5, "countdown/pass@4": 0.75})
    return events_pb2.Event(role=types_pb2.ROLE_ROLLOUT, source="rollout@n0", evaluation_reported=body)


def show_all(view: OpenView) -> None:
    with view:
        view.plan("learning rate: a budget of 3 updates")
        view.step("NATS and Redis")
        for event in (progress(1), progress(4), reported(), failed(), resized(), not_resized(), evaluated()):
            view.event(event)
        view.job(control_pb2.GetJobResponse(job="small", phase="running", iteration=2, num_iterations=3))
        view.job(control_pb2.GetJobResponse(job="small", phase="running", iteration=2, num_iterations=3))
        view.note("rollout@n0 was killed")


def test_without_a_terminal_every_line_is_a_json_object() -> None:
    stream = io.StringIO()
    view = make_view(UnfailingStream(stream))
    assert isinstance(view, LinesView)
    show_all(view)
    lines: list[dict[str, Any]] = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines.pop(0)["message"] == "learning rate: a budget of 3 updates"
    assert [line["event"] for line in lines] == [
        "starting",
        "progress",
        "progress",
        "iteration",
        "failure",
        "resized",
        "failure",
        "evaluation",
        "job",
        "note",
    ]
    assert list(lines[0])[:3] == ["time", "level", "event"]
    assert (lines[2]["role"], lines[2]["num_done"], lines[2]["num_tokens"]) == ("rollout", 4, 12.5)
    assert (lines[3]["reward_mean"], lines[3]["samples_trained"], lines[3]["num_failed_rewards"]) == (0.75, 8, 5)
    assert lines[4]["message"] == "a process ended with status -9"
    assert (lines[5]["source"], lines[5]["target"], lines[5]["gpus"]) == ("tp2-dp2", "tp2", ["n0/1", "n0/0"])
    assert (lines[5]["moved_bytes"], lines[5]["seconds"]) == (640, 0.25)
    assert lines[6]["message"] == "the actor stays as it is: no memory"
    assert (lines[7]["version"], lines[7]["reward_mean"], lines[7]["countdown/pass@4"]) == (2, 0.5, 0.75)


def test_on_a_terminal_each_iteration_leaves_its_line() -> None:
    stream = Terminal()
    view = make_view(UnfailingStream(stream))
    assert isinstance(view, TerminalView)
    show_all(view)
    want = "iteration 2: reward 0.750, loss -0.0100, 8 samples trained, 5 rewards failed and count as 0"
    assert want in " ".join(stream.getvalue().split())
    assert "actor resized: tp2-dp2 -> tp2 on n0/1, n0/0, 640 bytes moved in 0.25 s" in " ".join(
        stream.getvalue().split()
    )
    assert "version 2 evaluated: countdown/pass@4 0.750, reward_mean 0.500" in stream.getvalue()
    assert "rollout@n0 was killed" in stream.getvalue()
    assert "learning rate: a budget of 3 updates" in stream.getvalue()


DP2, TP2 = types_pb2.Layout(dp=2), types_pb2.Layout(tp=2)
CHANGES = {
    "dead ranks are replaced": (
        committed(DP2, DP2, num_dead=1),
        "recovered",
        "actor recovered: 1 of 2 ranks replaced, dp2 on n0/1, n0/0, 640 bytes moved in 0.25 s",
    ),
    "other GPUs": (
        committed(DP2, DP2, num_dead=0),
        "moved",
        "actor moved: dp2 on n0/1, n0/0, 640 bytes moved in 0.25 s",
    ),
    "another layout in place of dead ranks": (
        committed(DP2, TP2, num_dead=1),
        "resized",
        "actor resized: dp2 -> tp2 without the 1 of 2 ranks that died on n0/1, n0/0, 640 bytes moved in 0.25 s",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_recovery_is_shown_as_one_and_not_as_a_resize(case: str) -> None:
    event, want_name, want_text = CHANGES[case]
    lines, terminal = io.StringIO(), Terminal()
    for stream in (lines, terminal):
        with make_view(UnfailingStream(stream)) as view:
            view.event(event)
    assert json.loads(lines.getvalue())["event"] == want_name
    assert want_text in " ".join(terminal.getvalue().split())


def test_a_terminal_shows_a_message_once_though_the_phase_goes_on() -> None:
    stream = Terminal()
    with make_view(UnfailingStream(stream)) as view:
        for phase in ("submitted", "starting"):
            view.job(control_pb2.GetJobResponse(job="small", phase=phase, message="resumes from checkpoint c"))
    assert stream.getvalue().count("resumes from checkpoint c") == 1


def test_a_terminal_that_is_closed_ends_no_run() -> None:
    show_all(make_view(UnfailingStream(ClosedTerminal())))


def test_a_table_has_its_numbers_to_the_right_and_a_dash_for_what_is_missing() -> None:
    rows: list[dict[str, Any]] = [
        {"job": "a", "reward_mean": 0.123456, "gpus": ["n0/0", "n0/1"]},
        {"job": "long-name", "reward_mean": None},
    ]
    assert table(rows, ["job", "reward_mean", "gpus"]).splitlines() == [
        "JOB        REWARD MEAN  GPUS",
        "a               0.1235  n0/0,n0/1",
        "long-name            -  -",
    ]


def test_the_table_at_the_end_of_a_long_run_is_cut_in_the_middle() -> None:
    rows = [{"iteration": number} for number in range(MOST_ROWS + 7)]
    lines = cut_table(rows, ["iteration"], rest="describe lists them").splitlines()
    numbers = [int(line) for line in lines if line.strip().isdecimal()]
    assert numbers == [*range(15), *range(22, 37)]
    assert lines[16] == "... 7 rows are left out here: describe lists them"


def test_a_table_of_thirty_rows_is_whole() -> None:
    rows = [{"iteration": number} for number in range(MOST_ROWS)]
    assert cut_table(rows, ["iteration"], rest="") == table(rows, ["iteration"])
