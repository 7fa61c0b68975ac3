"""Renders GPU timelines and tables as one HTML document: a strip for each run, on one time axis, with GPUs as rows.

The page contains its style and its script, which are files of this folder. It thus opens without a network, and also
years later. Of 1,024 GPUs most do the same at the same time, so each different sequence of spans is written once, with
its GPUs. Times are whole milliseconds of a strip's window. Without its script, a page shows the same facts in tables.

Invariant: no text of a caller can end a script or begin a tag. [test_run_report: can_end_a_pages_script]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from tidegate.timeline import Span, Window
from tidegate.types import GpuId, node_of

STATES: Mapping[str, str] = {
    "generating": "the rollout makes tokens",
    "inferring": "the inference computes log-probabilities",
    "computing_log_probs": "the inference computes log-probabilities",
    "training": "the actor computes an update",
    "draining": "an engine hands over its requests",
    "building": "makes the groups and tensors of another layout",
    "transferring": "copies its state into another layout",
    "switching": "changes its layout; in a simulation it also drains, loads or starts",
    "starting": "makes its model and joins its component",
    "loading_weights": "reads a published version",
    "publishing": "writes its part of a version",
    "saving": "writes its part of a checkpoint",
    "waiting": "its component has no work for it",
    "waiting_minibatch": "the actor has no minibatch for it",
    "waiting_prompts": "the rollout has no prompt for it",
    "waiting_samples": "the inference has no samples for it",
    "free": "no component holds it",
    "lost": "its holder died",
    "unknown": "it wrote nothing",
}
"""The legend of each state, in the order of stacking. A state that is not listed comes last."""

_NS_PER_MS = 1_000_000

_NUMBER = re.compile(r"[-+]?[\d,]+(\.\d+)?")
_NONE = "\N{EN DASH}"


class MarkKind(StrEnum):
    """The kind of a mark. Its value is the legend's text."""

    DECISION = "decision"
    BOUNDARY = "minibatch ends"
    ITERATION = "iteration ends"
    REFERENCE = "bound"
    """A time for comparison, at which nothing happened."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in a strip, on the clock of its spans."""

    at_ns: int
    kind: MarkKind
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Columns of numbers are right-aligned; empty cells show a dash. `is_folded`: collapsed at first."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """One timeline. Each GPU's spans are contiguous and fill the window."""

    name: str
    facts: str
    window: Window
    lanes: Mapping[GpuId, Sequence[Span]]
    marks: Sequence[Mark] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """`head` are the tables above the strips, `foot` those below."""

    title: str
    subtitle: str
    strips: Sequence[Strip]
    head: Sequence[Table] = ()
    foot: Sequence[Table] = ()


def rendered(page: Page) -> str:
    """The HTML document."""
    folder = files("tidegate.timeline_page")
    states = _states(page.strips)
    return Template((folder / "page.html").read_text()).substitute(
        title=escape(page.title),
        subtitle=escape(page.subtitle),
        style=(folder / "page.css").read_text(),
        script=(folder / "page.js").read_text(),
        legend="".join(_legend(states, page.strips)),
        head="".join(map(_table, page.head)),
        strips="".join(_strip(at, strip) for at, strip in enumerate(page.strips)),
        foot="".join(map(_table, page.foot)),
        data=_as_script_data({"states": states, "strips": [_strip_data(strip, states) for strip in page.strips]}),
    )


def _states(strips: Sequence[Strip]) -> list[str]:
    found = {span.state for strip in strips for spans in strip.lanes.values() for span in spans}
    return [*(state for state in STATES if state in found), *sorted(found - STATES.keys())]


def _strip_data(strip: Strip, states: Sequence[str]) -> dict[str, Any]:
    number = {state: at for at, state in enumerate(states)}
    same: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for gpu, spans in enumerate(strip.lanes.values()):
        begins = ((_ms(span.start_ns, strip.window), number[span.state]) for span in spans)
        same.setdefault(tuple(_without_repeats(begins)), []).append(gpu)
    return {
        "name": strip.name,
        "end": _ms(strip.window.end_ns, strip.window),
        "gpus": list(strip.lanes),
        "nodes": [node_of(gpu) for gpu in strip.lanes],
        "lanes": [
            {"gpus": gpus, "at": [at for at, _ in lane], "state": [s for _, s in lane]} for lane, gpus in same.items()
        ],
        "marks": [[_ms(mark.at_ns, strip.window), mark.kind.name.lower(), mark.text] for mark in strip.marks],
    }


def _without_repeats(begins: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The begins without repeats: the last of those in one millisecond, the first of neighbours in one state."""
    held: tuple[int, int] | None = None
    last_state: int | None = None
    for begin in begins:
        if held is not None and held[0] < begin[0] and held[1] != last_state:
            last_state = held[1]
            yield held
        held = begin
    if held is not None and held[1] != last_state:
        yield held


def _ms(at_ns: int, window: Window) -> int:
    return (at_ns - window.start_ns) // _NS_PER_MS


def _as_script_data(value: Any) -> str:
    """JSON that cannot end the script: it escapes `<`, which `</script>` and `<!--` contain."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _legend(states: Sequence[str], strips: Sequence[Strip]) -> Iterator[str]:
    for state in states:
        description = escape(STATES.get(state, ""))
        yield f'<li title="{description}"><i data-state="{escape(state)}"></i>{escape(state)}</li>'
    found = {mark.kind for strip in strips for mark in strip.marks}
    for kind in MarkKind:
        if kind in found:
            yield f'<li><b data-mark="{kind.name.lower()}"></b>{kind.value}</li>'


def _strip(at: int, strip: Strip) -> str:
    name = escape(strip.name)
    tables = "".join(map(_table, strip.tables))
    return (
        f'<section class="strip"><h2>{name} <span class="facts">{escape(strip.facts)}</span></h2>'
        f'<canvas data-strip="{at}" role="img" aria-label="GPU timeline of {name}: {escape(strip.facts)}"></canvas>'
        f"{tables}</section>"
    )


def _table(table: Table) -> str:
    right = [all(_NUMBER.fullmatch(row[at] or "0") for row in table.rows) for at in range(len(table.columns))]
    classes = [' class="number"' if is_right else "" for is_right in right]
    head = "".join(f"<th{mark}>{escape(text)}</th>" for mark, text in zip(classes, table.columns, strict=True))
    rows = "".join(f"<tr>{''.join(_cells(row, classes))}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    grid = f'<div class="grid"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
    title = escape(table.title)
    if table.is_folded:
        return f"<details><summary>{title}</summary>{grid}</details>"
    return f"<section><h2>{title}</h2>{grid}</section>"


def _cells(row: Sequence[str], classes: Sequence[str]) -> Iterator[str]:
    return (f"<td{mark}>{escape(text or _NONE)}</td>" for mark, text in zip(classes, row, strict=True))
