"""The trace of every GPU slot over a job's whole time, merged from the spans of all instances.

Each instance writes one line per span into `<folder>/<instance>.jsonl`: {"gpu", "state", "start_ns", "end_ns"}, with
"work" (iteration, version, tokens) where it is known. A line {"gpu", "released_ns"} says that the slot's process gave
it back. Times are those of the machine's monotonic clock. The folder's file of offsets (`tidegate.clocks`) makes those
of other machines times of the launcher's. Merging does the following for each slot:
1. It clips the spans to the window and sorts them.
2. It fills the time before the first and after the last span with `free`.
3. It fills a gap between spans with `free` where the slot was given back in it, else with `unknown`: the slot's process
   died without writing.

Invariants:
- A slot's spans are contiguous and fill the window, so its states add up exactly to the wall time.
  [test_timeline: sum_to_the_wall_time]
- Between two holders of a slot it is free. [test_timeline: given_back_is_free]
- A line that is incomplete because its writer was killed is left out. [test_timeline: line_cut_off_by_a_kill]
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.clocks import Clocks
from tidegate.json_text import parse_json, typed
from tidegate.types import GpuId, NodeId, node_of

CLOCK_ERROR = "clock_error_ns"
"""In a trace's `otherData`."""
FREE = "free"
UNKNOWN = "unknown"


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """A slot was in `state` from `start_ns` to `end_ns`, the end excluded."""

    start_ns: int
    end_ns: int
    state: str
    work: tuple[tuple[str, int], ...] = ()
    """What the slot worked on, as far as it is known: iteration, minibatch, version, tokens."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time that the trace covers, on the launcher's monotonic clock."""

    start_ns: int
    end_ns: int

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


def read_spans(folder: Path) -> dict[GpuId, list[Span]]:
    """The spans of all instances by slot, in the order of writing."""
    spans: dict[GpuId, list[Span]] = {}
    clocks = Clocks.read(folder)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            found = _span(line, clocks)
            if found is not None:
                spans.setdefault(found[0], []).append(found[1])
    return spans


def read_releases(folder: Path) -> dict[GpuId, list[int]]:
    """The times at which each slot was given back."""
    releases: dict[GpuId, list[int]] = {}
    clocks = Clocks.read(folder)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = parse_json(line)
                gpu, released_ns = typed(str, row["gpu"], "gpu"), typed(int, row["released_ns"], "released_ns")
                releases.setdefault(GpuId(gpu), []).append(clocks.here_ns(node_of(GpuId(gpu)), released_ns))
    return releases


def fill(spans: Iterable[Span], window: Window, *, released_ns: Sequence[int] = ()) -> list[Span]:
    """One slot's spans, contiguous from the window's start to its end. Where two overlap, the earlier one counts.
    `released_ns`: when the slot was given back."""
    filled: list[Span] = []
    at_ns = window.start_ns
    for span in sorted(spans):
        start_ns, end_ns = max(span.start_ns, at_ns), min(span.end_ns, window.end_ns)
        if end_ns <= start_ns:
            continue
        if start_ns > at_ns:
            is_free = not filled or any(at_ns <= given_ns <= start_ns for given_ns in released_ns)
            filled.append(Span(at_ns, start_ns, FREE if is_free else UNKNOWN))
        filled.append(Span(start_ns, end_ns, span.state, span.work))
        at_ns = end_ns
    if at_ns < window.end_ns:
        filled.append(Span(at_ns, window.end_ns, FREE))
    return filled


def state_lengths(spans: Iterable[Span]) -> dict[str, int]:
    """The nanoseconds in each state, by name."""
    lengths: dict[str, int] = {}
    for span in spans:
        lengths[span.state] = lengths.get(span.state, 0) + span.end_ns - span.start_ns
    return dict(sorted(lengths.items()))


def chrome_trace(spans: Mapping[GpuId, Sequence[Span]], window: Window) -> dict[str, Any]:
    """The trace in the trace-event format of chrome://tracing and Perfetto: a process per node, a thread per slot.

    `otherData` holds the exact lengths in nanoseconds. The events' times are microseconds from the window's start.
    """
    nodes = sorted({node_of(gpu) for gpu in spans})
    pid_of = {node: number for number, node in enumerate(nodes, start=1)}
    events: list[dict[str, Any]] = [_named("process_name", pid=pid, tid=0, name=node) for node, pid in pid_of.items()]
    for gpu in sorted(spans, key=_node_and_index):
        pid, tid = pid_of[node_of(gpu)], _node_and_index(gpu)[1]
        events.append(_named("thread_name", pid=pid, tid=tid, name=f"GPU {gpu}"))
        events.extend(
            {
                "name": span.state,
                "cat": "slot",
                "ph": "X",
                "ts": (span.start_ns - window.start_ns) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "pid": pid,
                "tid": tid,
                **({"args": dict(span.work)} if span.work else {}),
            }
            for span in spans[gpu]
        )
    lengths = {gpu: state_lengths(spans[gpu]) for gpu in sorted(spans, key=_node_and_index)}
    other = {"wall_ns": window.wall_ns, "state_ns": lengths}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": other}


def mark_event(at_us: float, name: str, details: Mapping[str, Any], *, pid: int) -> dict[str, Any]:
    """A moment of a trace, across all slots of a process."""
    return {"name": name, "cat": name, "ph": "i", "s": "p", "ts": at_us, "pid": pid, "tid": 0, "args": dict(details)}


def write_trace(
    folder: Path,
    target: Path,
    *,
    gpus: Sequence[GpuId],
    window: Window,
    start_unix_ns: int | None = None,
    far: Iterable[NodeId] = (),
) -> None:
    """Merge the instances' files into `target`, by one atomic replacement. A slot of `gpus` without a span was free.
    `start_unix_ns`: the time of the window's start, for what other clocks have recorded. `far`: other machines' nodes.
    """
    found, releases = read_spans(folder), read_releases(folder)
    slots = {gpu: fill(found.get(gpu, ()), window, released_ns=releases.get(gpu, ())) for gpu in gpus}
    trace = chrome_trace(slots, window)
    if start_unix_ns is not None:
        trace["otherData"]["start_unix_ns"] = start_unix_ns
    if error_ns := clock_error_ns(folder, far):
        trace["otherData"][CLOCK_ERROR] = error_ns
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(trace))
    os.replace(partial, target)


def clock_error_ns(folder: Path, far: Iterable[NodeId]) -> dict[NodeId, int | None]:
    """By node of another machine (`far`): by how much its spans may be off. None: its clock was never read."""
    known = Clocks.read(folder).error_ns()
    return {node: known.get(node) for node in far}


def _span(line: str, clocks: Clocks) -> tuple[GpuId, Span] | None:
    try:
        row = typed(dict, parse_json(line), "a span")
        gpu = GpuId(typed(str, row["gpu"], "gpu"))
        start_ns, end_ns = (
            clocks.here_ns(node_of(gpu), typed(int, row[name], name)) for name in ("start_ns", "end_ns")
        )
        work = tuple((name, typed(int, each, name)) for name, each in typed(dict, row.get("work", {}), "work").items())
        return gpu, Span(start_ns, end_ns, typed(str, row["state"], "state"), work)
    except (ValueError, KeyError):
        return None


def _named(event: str, *, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _node_and_index(gpu: GpuId) -> tuple[NodeId, int]:
    return node_of(gpu), int(gpu.rpartition("/")[2])
