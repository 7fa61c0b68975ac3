"""Times of other machines' clocks become times of this one's, within an error that is told."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tidegate.clocks import FILE, Clocks, Offset, line_of
from tidegate.timeline import Span, Window, read_releases, read_spans, write_trace
from tidegate.types import GpuId, NodeId

NODE = NodeId("b")
S = 1_000_000_000


@given(
    asked_ns=st.integers(0, 10**15),
    there_after_ns=st.integers(0, 10**7),
    answered_after_ns=st.integers(0, 10**7),
    ahead_ns=st.integers(-(10**15), 10**15),
)
def test_a_time_between_question_and_answer_is_found_within_the_error(
    asked_ns: int, there_after_ns: int, answered_after_ns: int, ahead_ns: int
) -> None:
    took_ns = there_after_ns + answered_after_ns
    found = Offset.measured(asked_ns, asked_ns + there_after_ns + ahead_ns, asked_ns + took_ns)
    clocks = Clocks({NODE: (found,)})
    assert abs(clocks.here_ns(NODE, found.there_ns) - (asked_ns + there_after_ns)) <= found.error_ns
    assert clocks.error_ns() == {NODE: found.error_ns + 1_500_000}, "and half a minute's drift"
    assert 2 * found.error_ns <= took_ns + 1


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(-(10**6), 10**6)), min_size=1, max_size=6),
    st.lists(st.integers(0, 700 * S), min_size=2, max_size=20),
)
def test_times_of_one_clock_keep_their_order(drifts: list[tuple[int, int]], times: list[int]) -> None:
    """Offsets that change by a millisecond in a second or longer."""
    there_ns, offset_ns, offsets = 0, 5 * S, []
    for seconds, change_ns in drifts:
        there_ns, offset_ns = there_ns + seconds * S, offset_ns + change_ns
        offsets.append(Offset(there_ns, offset_ns, 100))
    clocks = Clocks({NODE: tuple(offsets)})
    found = [clocks.here_ns(NODE, each) for each in sorted(times)]
    assert found == sorted(found)


def test_between_two_offsets_a_clock_drifts_evenly_and_a_node_without_any_shares_this_clock() -> None:
    clocks = Clocks({NODE: (Offset(100 * S, 50_000, 10), Offset(200 * S, 150_000, 30))})
    assert clocks.here_ns(NODE, 90 * S) == 90 * S - 50_000
    assert clocks.here_ns(NODE, 150 * S) == 150 * S - 100_000
    assert clocks.here_ns(NODE, 300 * S) == 300 * S - 150_000
    assert clocks.here_ns(NodeId("n0"), 7) == 7
    assert clocks.error_ns() == {NODE: 30 + 5_000_000}, "and the drift of a hundred seconds"


def test_a_machine_that_started_anew_disturbs_no_time_of_before_or_after() -> None:
    before, after = Offset(90_000 * S, 80_000 * S, 10), Offset(5 * S, -11_000 * S, 10)
    clocks = Clocks({NODE: (after, before)})
    assert clocks.here_ns(NODE, 90_010 * S) == 10_010 * S
    assert clocks.here_ns(NODE, 40 * S) == 11_040 * S


def test_the_spans_of_another_machine_lie_beside_those_of_this_one(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(line_of([NODE, NodeId("c")], Offset(1_000_150, 1_000_000, 20)))
    there = {"gpu": "b/0", "state": "training", "start_ns": 1_000_110, "end_ns": 1_000_140}
    lines = [json.dumps(there), json.dumps({"gpu": "b/0", "released_ns": 1_000_150})]
    (tmp_path / "actor@b.jsonl").write_text("\n".join(lines))
    (tmp_path / "actor@a.jsonl").write_text(json.dumps(there | {"gpu": "a/0", "start_ns": 110, "end_ns": 140}))
    assert read_spans(tmp_path) == {GpuId(gpu): [Span(110, 140, "training")] for gpu in ("a/0", "b/0")}
    assert read_releases(tmp_path) == {GpuId("b/0"): [150]}
    far = [NODE, NodeId("unread")]
    write_trace(tmp_path, target := tmp_path / "trace.json", gpus=[GpuId("b/0")], window=Window(100, 200), far=far)
    assert json.loads(target.read_text())["otherData"]["clock_error_ns"] == {"b": 1_500_020, "unread": None}


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = line_of([NODE], Offset(100, 50, 1))
    (tmp_path / FILE).write_text(f"{whole}[]\n{whole[:-9]}")
    assert Clocks.read(tmp_path).offsets == {NODE: (Offset(100, 50, 1),)}
    assert not Clocks.read(tmp_path / "none").offsets
