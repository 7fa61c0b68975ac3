"""`tidegate timeline JOB`: what each GPU slot did and when, as a trace, a page or JSON.

The renderers are those of the simulator: `tidegate.timeline` and `tidegate.timeline_page`. A live job shows its spans
so far; a killed one those that it wrote.

Invariants:
- All forms show the same spans. [test_timeline_command: all_forms_show_the_same]
- A slot's states add up to the wall time. [test_timeline_command: add_up_to_the_wall_time]
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cli.jobs import UnknownJob
from cli.moves import Moves, moves_of
from tidegate.attempts import AttemptFolder, attempts_in
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.json_text import parse_json
from tidegate.launcher.lock import launcher_pid
from tidegate.short_lists import counted
from tidegate.timeline import (
    CLOCK_ERROR,
    Span,
    Window,
    chrome_trace,
    clock_error_ns,
    fill,
    mark_event,
    read_spans,
    state_lengths,
)
from tidegate.timeline_page.page import Mark, MarkKind, Page, Strip, Table, rendered
from tidegate.types import GpuId, NodeId

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000


class TimelineForm(StrEnum):
    PERFETTO = "perfetto"
    HTML = "html"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Timeline:
    """One attempt. `start_unix_ns` is the time of the window's start; None where it is not known. `clock_error_ns`: by
    node of another machine, by how much its times may be off; None: its clock was never read (`tidegate.clocks`)."""

    lanes: Mapping[GpuId, Sequence[Span]]
    window: Window
    start_unix_ns: int | None
    clock_error_ns: Mapping[NodeId, int | None] = field(default_factory=dict)

    def at_ns(self, at_ms: int) -> int | None:
        """A time of the store's clock on the clock of the spans. None outside of the window."""
        if self.start_unix_ns is None:
            return None
        at_ns = at_ms * _NS_PER_MS - self.start_unix_ns + self.window.start_ns
        return at_ns if self.window.start_ns <= at_ns <= self.window.end_ns else None


def timeline_text(folder: JobFolder, form: TimelineForm, *, attempt: int | None) -> str:
    """UnknownJob: there is no such attempt, or it has no span yet."""
    chosen = _attempt(folder, attempt)
    found, moves = _timeline(folder, chosen), moves_of(folder)
    match form:
        case TimelineForm.PERFETTO:
            return json.dumps(as_trace(found, moves))
        case TimelineForm.HTML:
            return rendered(as_page(folder.root.name, chosen.number, found, moves))
        case TimelineForm.JSON:
            return json.dumps(as_json(folder.root.name, chosen.number, found, moves))


def as_trace(found: Timeline, moves: Moves) -> dict[str, Any]:
    trace = chrome_trace(found.lanes, found.window)
    if found.clock_error_ns:
        trace["otherData"][CLOCK_ERROR] = dict(found.clock_error_ns)
    for mark in _marks(found, moves):
        at_us = (mark.at_ns - found.window.start_ns) / 1000
        trace["traceEvents"].append(mark_event(at_us, str(mark.kind), {"reason": mark.text}, pid=1))
    return trace


def as_page(job: str, attempt: int, found: Timeline, moves: Moves) -> Page:
    wall_s = found.window.wall_ns / _NS_PER_S
    summary = moves.summary()
    facts = f"{wall_s:.1f} s, {counted(summary['moves'], 'move')} in {summary['switch_s']:.1f} s of switches"
    rows = [
        [each.transition, str(each.iteration or 0), str(each), each.reason]
        for each in moves.moves
        if found.at_ns(each.at_ms) is not None
    ]
    tables = [Table(counted(len(rows), "move"), ("transition", "iteration", "move", "reason"), rows, is_folded=True)]
    strip = Strip(job, facts, found.window, found.lanes, _marks(found, moves), tables if rows else ())
    return Page(
        title=f"{job}: attempt {attempt} on {counted(len(found.lanes), 'GPU')}",
        subtitle=f"{wall_s:.1f} s of wall time{_told_clocks(found)}",
        strips=[strip],
        head=[_shares(found)],
    )


def as_json(job: str, attempt: int, found: Timeline, moves: Moves) -> dict[str, Any]:
    start_ns = found.window.start_ns
    return {
        "job": job,
        "attempt": attempt,
        "wall_s": found.window.wall_ns / _NS_PER_S,
        "clock_error_s": {
            node: None if error is None else error / _NS_PER_S for node, error in found.clock_error_ns.items()
        },
        "start_unix_s": None if found.start_unix_ns is None else found.start_unix_ns / _NS_PER_S,
        "gpus": [
            {
                "gpu": gpu,
                "state_s": {state: length / _NS_PER_S for state, length in state_lengths(spans).items()},
                "spans": [
                    {
                        "start_s": (span.start_ns - start_ns) / _NS_PER_S,
                        "end_s": (span.end_ns - start_ns) / _NS_PER_S,
                        "state": span.state,
                        **dict(span.work),
                    }
                    for span in spans
                ],
            }
            for gpu, spans in found.lanes.items()
        ],
        "moves": [each.row() for each in moves.moves],
        "marks": [
            {"at_s": (mark.at_ns - start_ns) / _NS_PER_S, "what": str(mark.kind), "text": mark.text}
            for mark in _marks(found, moves)
        ],
    }


def _attempt(folder: JobFolder, number: int | None) -> AttemptFolder:
    attempts = {each.number: each for each in attempts_in(folder.root)}
    if number is None:
        return folder.attempt()
    if number not in attempts:
        known = ", ".join(map(str, attempts)) or "none"
        raise UnknownJob(f"job {folder.root.name} has no attempt {number}; there are {known}")
    return attempts[number]


def _timeline(folder: JobFolder, attempt: AttemptFolder) -> Timeline:
    if attempt.trace.exists():
        try:
            return _of_trace(parse_json(attempt.trace.read_bytes()))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnknownJob(
                f"{attempt.trace} is damaged ({type(error).__name__}: {error}): remove it, and the spans in "
                f"{attempt.timeline} are read again"
            ) from error
    spans = read_spans(attempt.timeline)
    if not spans:
        raise UnknownJob(
            f"attempt {attempt.number} of job {folder.root.name} has no timeline yet: its workers write their first "
            "spans when they start"
        )
    every = [span for each in spans.values() for span in each]
    window = Window(min(span.start_ns for span in every), max(span.end_ns for span in every))
    cluster = JobConfig.read(folder.config).cluster
    is_live = launcher_pid(folder) is not None
    # The machine's clocks tell the offset as long as it has not restarted, which a killed run may have survived.
    start_unix_ns = time.time_ns() - time.monotonic_ns() + window.start_ns if is_live else None
    lanes = {gpu: fill(spans.get(gpu, ()), window) for gpu in cluster.gpus()}
    return Timeline(lanes, window, start_unix_ns, clock_error_ns(attempt.timeline, cluster.far_nodes()))


def _of_trace(trace: Mapping[str, Any]) -> Timeline:
    """The inverse of `chrome_trace`, up to the start of the window."""
    names = {
        (event["pid"], event["tid"]): GpuId(event["args"]["name"].removeprefix("GPU "))
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    lanes: dict[GpuId, list[Span]] = {gpu: [] for gpu in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start_ns = round(event["ts"] * 1000)
            work = tuple(event.get("args", {}).items())
            span = Span(start_ns, start_ns + round(event["dur"] * 1000), event["name"], work)
            lanes[names[event["pid"], event["tid"]]].append(span)
    other = trace["otherData"]
    errors = {NodeId(node): error for node, error in other.get(CLOCK_ERROR, {}).items()}
    return Timeline(lanes, Window(0, int(other["wall_ns"])), other.get("start_unix_ns"), errors)


def _marks(found: Timeline, moves: Moves) -> list[Mark]:
    marks = [(found.at_ns(line["at_ms"]), MarkKind.DECISION, str(line["reason"])) for line in moves.decisions]
    for (_, iteration), (_, reported_ms) in moves.iterations.items():
        if reported_ms is not None:
            marks.append((found.at_ns(reported_ms), MarkKind.ITERATION, f"iteration {iteration} is trained"))
    return sorted((Mark(at, kind, text) for at, kind, text in marks if at is not None), key=lambda mark: mark.at_ns)


def _told_clocks(found: Timeline) -> str:
    """How far other machines' clocks may be off. Empty for a job on one machine."""
    known = [error for error in found.clock_error_ns.values() if error is not None]
    unknown = sorted(node for node, error in found.clock_error_ns.items() if error is None)
    told = f"; times of other machines within {max(known) / _NS_PER_MS:.1f} ms" if known else ""
    return told + (f"; the clocks of {', '.join(unknown)} are not known, nor when they did what" if unknown else "")


def _shares(found: Timeline) -> Table:
    """The time of all slots by state, in per cent."""
    lengths = state_lengths(span for spans in found.lanes.values() for span in spans)
    whole = sum(lengths.values()) or 1
    rows = [[state, f"{100 * length / whole:.1f}"] for state, length in lengths.items()]
    return Table("Time of all GPUs", ("state", "%"), rows)
