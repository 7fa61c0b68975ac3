"""The merged timeline: every slot's states fill the wall time exactly, whatever its workers wrote."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tidegate.timeline import Span, Window, chrome_trace, fill, read_spans, state_lengths, write_trace
from tidegate.types import GpuId

WINDOW = Window(100, 200)


def spans_of(draws: list[tuple[int, int, str]]) -> list[Span]:
    return [Span(start, start + length, state) for start, length, state in draws]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 80), st.sampled_from(["training", "waiting"]))))
def test_the_states_of_a_slot_sum_to_the_wall_time(draws: list[tuple[int, int, str]]) -> None:
    filled = fill(spans_of(draws), WINDOW)
    assert sum(state_lengths(filled).values()) == WINDOW.wall_ns
    assert [span.start_ns for span in filled] == [WINDOW.start_ns, *(span.end_ns for span in filled[:-1])]
    assert all(span.end_ns > span.start_ns for span in filled)


def test_a_slot_is_free_before_and_after_its_spans_and_unknown_between_them() -> None:
    want = [Span(100, 110, "free"), Span(110, 120, "training"), Span(120, 150, "unknown")]
    want += [Span(150, 160, "saving"), Span(160, 200, "free")]
    assert fill([Span(150, 160, "saving"), Span(110, 120, "training")], WINDOW) == want


def test_a_slot_that_was_given_back_is_free_until_its_next_holder() -> None:
    spans = [Span(110, 120, "generating"), Span(150, 160, "training"), Span(170, 180, "training")]
    want = [(100, "free"), (110, "generating"), (120, "free"), (150, "training"), (160, "unknown"), (170, "training")]
    filled = fill(spans, Window(100, 180), released_ns=[121, 180])
    assert [(span.start_ns, span.state) for span in filled] == want


def test_spans_are_cut_off_at_the_window() -> None:
    assert fill([Span(0, 120, "training"), Span(180, 900, "saving")], WINDOW) == [
        Span(100, 120, "training"),
        Span(120, 180, "unknown"),
        Span(180, 200, "saving"),
    ]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps({"gpu": "n0/0", "state": "training", "start_ns": 1, "end_ns": 2})
    (tmp_path / "actor@n0.jsonl").write_text(f"{whole}\n{whole[:-9]}")
    assert read_spans(tmp_path) == {"n0/0": [Span(1, 2, "training")]}


def test_the_trace_has_a_process_a_node_a_thread_a_slot_and_microseconds() -> None:
    trace = chrome_trace({GpuId("n1/0"): [Span(100, 1600, "training")], GpuId("n0/3"): []}, Window(100, 1600))
    names = [(event["name"], event["pid"], event["tid"], event["args"]["name"]) for event in trace["traceEvents"][:2]]
    assert names == [("process_name", 1, 0, "n0"), ("process_name", 2, 0, "n1")]
    want = {"name": "training", "cat": "slot", "ph": "X", "ts": 0.0, "dur": 1.5, "pid": 2, "tid": 0}
    assert trace["traceEvents"][-1] == want
    assert trace["otherData"]["state_ns"]["n1/0"] == {"training": 1500}


def test_a_span_of_the_trace_carries_iteration_version_and_tokens(tmp_path: Path) -> None:
    work = {"iteration": 3, "version": 3, "tokens": 512}
    row = {"gpu": "n0/0", "state": "training", "start_ns": 120, "end_ns": 150, "work": work}
    (tmp_path / "actor@n0.jsonl").write_text(json.dumps(row) + "\n")
    write_trace(tmp_path, tmp_path / "timeline.json", gpus=[GpuId("n0/0")], window=WINDOW)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [event["args"] for event in events if event["name"] == "training"] == [work]


def test_an_unused_slot_was_free_all_the_time(tmp_path: Path) -> None:
    write_trace(tmp_path, tmp_path / "timeline.json", gpus=[GpuId("n0/0")], window=WINDOW)
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert trace["otherData"] == {"wall_ns": 100, "state_ns": {"n0/0": {"free": 100}}}


def test_a_trace_knows_from_the_files_when_a_slot_was_given_back(tmp_path: Path) -> None:
    gpu = GpuId("n0/0")
    spans = [{"gpu": gpu, "state": "training", "start_ns": at, "end_ns": at + 10} for at in (0, 50)]
    lines = [spans[0], {"gpu": gpu, "released_ns": 12}, spans[1]]
    (tmp_path / "actor@n0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_trace(tmp_path, tmp_path / "trace.json", gpus=[gpu], window=Window(0, 60))
    lengths = json.loads((tmp_path / "trace.json").read_text())["otherData"]["state_ns"]
    assert lengths == {gpu: {"free": 40, "training": 20}}
