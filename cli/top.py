"""`tidegate top JOB`: who has which GPU, backlog, rates, the last moves and their reasons. On a terminal it is drawn
again every second until the job ends; elsewhere, and with `--once`, it is printed once.

Invariant: a live job's view comes from its Control API and its log of moves, an ended job's from its folder.
[test_top: of_a_live_job, test_top: of_an_ended_job]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from cli import jobs
from cli.job_access import control_of
from cli.job_streams import goes_on_or_is_over
from cli.jobs import PLACES_ENDED
from cli.moves import MOST_MOVES, Moves, moves_of
from cli.rows import Form, Row, rounded, table, written
from tidegate.job import JobFolder
from tidegate.launcher.control import NotRunning
from tidegate.launcher.outcome import Outcome, role_name
from tidegate.ports.rpc import PeerUnavailable
from tidegate.short_lists import first_few
from tidegate.v1 import control_pb2, events_pb2

BEAT_S = 1.0
CLEAR = "\x1b[H\x1b[2J"
_EVENTS_BACK = 500
"""The events that the first look reads: the last figures of each component are among them."""
_COLUMNS = ("role", "state", "gpus", "layout", "on", "does")


@dataclass
class Figures:
    """The last figures of the job's events. `sequence`: of the last event that was read."""

    sequence: int = 0
    progress: dict[str, events_pb2.Progress] = field(default_factory=dict)
    backlog: dict[str, int] = field(default_factory=dict)
    generation: events_pb2.Generation | None = None
    inferring: events_pb2.Inferring | None = None

    def take(self, row: control_pb2.ListEventsResponse) -> None:
        self.sequence, event = row.stream_sequence, row.event
        match event.WhichOneof("body"):
            case "progress":
                self.progress[role_name(event.role)] = event.progress
            case "backlog":
                self.backlog[event.backlog.queue] = event.backlog.num_messages
            case "generation":
                self.generation = event.generation
            case "inferring":
                self.inferring = event.inferring

    def doing(self, role: str) -> str:
        progress = self.progress.get(role)
        return "" if progress is None else f"{progress.phase} {progress.num_done}/{progress.num_total}"

    def rates(self) -> Row:
        found: dict[str, Any] = {"backlog": dict(sorted(self.backlog.items()))}
        if (picture := self.generation) is not None:
            found["sequences"] = len(picture.places)
            found["unfinished"] = sum(place not in PLACES_ENDED for place in picture.places)
            found["rollout_tokens_per_s"] = rounded(sum(engine.rate_tokens_per_s for engine in picture.engines))
        if (inferring := self.inferring) is not None and inferring.HasField("rate_tokens_per_s_per_gpu"):
            found["inference_tokens_per_s_per_gpu"] = rounded(inferring.rate_tokens_per_s_per_gpu)
        return found


async def top(folder: JobFolder, form: Form, *, once: bool, beat_s: float = BEAT_S, out: TextIO | None = None) -> int:
    out = out or sys.stdout
    figures = Figures()
    if once or form is not Form.TABLE or not out.isatty():
        view = await look(folder, figures)
        print(written(view, form) if form is not Form.TABLE else text(view), file=out)
        return 0
    while True:
        try:
            view = await look(folder, figures)
            print(CLEAR + text(view), file=out, flush=True)
            if view["is_over"]:
                return 0
        except (NotRunning, PeerUnavailable):
            if not goes_on_or_is_over(folder):
                raise
        await asyncio.sleep(beat_s)


async def look(folder: JobFolder, figures: Figures) -> dict[str, Any]:
    """The view as one value. NotRunning: the job was killed, or does not answer."""
    if folder.result.exists():
        outcome = Outcome.read(folder.result)
        return _view(outcome.job, str(outcome.end), {}, moves_of(folder), figures, is_over=True)
    job = folder.root.name
    async with control_of(folder) as control:
        status = await control.GetJob(control_pb2.GetJobRequest(job=job))
        after = figures.sequence or max(0, status.applied_sequence - _EVENTS_BACK)
        async for row in control.ListEvents(control_pb2.ListEventsRequest(job=job, after_sequence=after)):
            figures.take(row)
        answer = await control.ListGpus(control_pb2.ListGpusRequest(job=job))
    others: dict[str, list[str]] = {}
    for gpu in answer.gpus:
        if gpu.transition_id or gpu.state != "owned":
            others.setdefault("moving" if gpu.transition_id else gpu.state, []).append(gpu.gpu)
    if status.drained_gpus:
        others["drained by hand"] = list(status.drained_gpus)
    return _view(status, status.phase, others, moves_of(folder), figures, is_over=False)


def text(view: dict[str, Any]) -> str:
    lines = [
        f"job {view['job']}: {view['state']}, iteration {view['iteration']} of {view['iterations']}, "
        f"incarnation {view['incarnation']}"
    ]
    rows = [{**row, "gpus": len(row["on"]), "on": first_few(row["on"], most=12)} for row in view["components"]]
    lines += ["", table(rows, _COLUMNS)]
    lines += [f"{state}: {first_few(gpus, most=12)}" for state, gpus in sorted(view["other_gpus"].items())]
    if figures := list(figure_lines(view["rates"])):
        lines += ["", *figures]
    if view["summary"]["moves"]:
        lines.append(view["moves_line"])
    if view["moves"]:
        lines += ["", "last moves", *(f"  {each['move']}: {each['reason']}" for each in view["moves"])]
    if view["last_reason"]:
        lines += ["", f"last decision: {view['last_reason']}"]
    return "\n".join(lines)


def figure_lines(rates: Row) -> Iterator[str]:
    """A line for each component, with units. A terminal of 80 columns has room for them."""
    if backlog := rates["backlog"]:
        yield "waiting: " + ", ".join(f"{count} {queue} groups" for queue, count in backlog.items())
    if "sequences" in rates:
        unfinished, every = rates["unfinished"], rates["sequences"]
        yield f"rollout: {unfinished} of {every} sequences unfinished, {rates['rollout_tokens_per_s']:.0f} tokens/s"
    if "inference_tokens_per_s_per_gpu" in rates:
        yield f"inference: {rates['inference_tokens_per_s_per_gpu']:.0f} tokens/s on each GPU"


def _view(
    status: control_pb2.GetJobResponse,
    state: str,
    others: dict[str, list[str]],
    found: Moves,
    figures: Figures,
    *,
    is_over: bool,
) -> dict[str, Any]:
    last = [each for each in found.moves if each.is_move][-MOST_MOVES:]
    components = [
        {
            "role": row["role"],
            "state": row["state"],
            "layout": row["layout"],
            "on": row["gpus"],
            "does": figures.doing(row["role"]),
        }
        for row in jobs.component_rows(status)
    ]
    return {
        "job": status.job,
        "state": state,
        "is_over": is_over,
        "iteration": status.iteration,
        "iterations": status.num_iterations,
        "incarnation": status.incarnation,
        "components": components,
        "other_gpus": others,
        "rates": figures.rates(),
        "summary": found.summary(),
        "moves_line": found.line(),
        "moves": [{**each.row(), "move": str(each), "reason": each.reason} for each in reversed(last)],
        "last_reason": status.last_reason,
    }
