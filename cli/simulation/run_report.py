"""Runs of one scenario, for people and for other programs: a page, a Chrome trace, a JSON value.

Invariant: all of them show the same spans and the same figures. [test_run_report: lanes_are_the_spans]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from simulator.happenings import Happening, What
from simulator.run import PolicyDecision, Run
from simulator.scenario import Scenario
from simulator.summary import NS_PER_S, Summary, lanes_of, summaries
from simulator.used_assumptions import used_assumptions
from tidegate.short_lists import counted
from tidegate.timeline import Window, chrome_trace, mark_event
from tidegate.timeline_page.page import Mark, MarkKind, Page, Strip, Table
from tidegate.types import node_of

ASSUMPTION_COLUMNS = ("key", "value", "source")
SOURCES_LEGEND = "P: published; F: fitted to a published figure; A: assumed"


def as_json(scenario: Scenario, runs: Sequence[Run]) -> dict[str, Any]:
    bound = runs[0].bound
    return {
        "scenario": scenario.name,
        "seed": runs[0].seed,
        "num_gpus": len(scenario.cluster.gpus()),
        "compared_with": runs[0].policy,
        "bound_s": bound.bound_s,
        "bounds": asdict(bound),
        "policies": [
            summary.row() | {"decisions": [_decision_row(decided) for decided in run.decisions]}
            for summary, run in zip(summaries(runs), runs, strict=True)
        ],
        "assumptions": assumption_rows(scenario),
    }


def assumption_rows(scenario: Scenario) -> list[dict[str, Any]]:
    """Every assumption, with its value and its source."""
    rows = []
    for own in used_assumptions(scenario):
        is_given = own.value != own.default
        source = f"given; by default {plain(own.default) or 'none'}, {own.source}" if is_given else own.source
        rows.append({"key": own.key, "value": own.value, "source": source})
    return rows


def as_trace(runs: Sequence[Run]) -> dict[str, Any]:
    """One process for each policy and node. `otherData` has each run's exact lengths, by policy."""
    events: list[dict[str, Any]] = []
    other: dict[str, Any] = {}
    for run in runs:
        trace = chrome_trace(lanes_of(run), _window(run))
        first = max((event["pid"] for event in events), default=0)
        events += [_of_policy(event | {"pid": event["pid"] + first}, run.policy) for event in trace["traceEvents"]]
        events += _decision_events(run, pid=first + 1)
        other[run.policy] = trace["otherData"]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": other}


def as_page(scenario: Scenario, runs: Sequence[Run]) -> Page:
    found = summaries(runs)
    num_gpus, own = len(scenario.cluster.gpus()), scenario.algorithm
    samples = f"{own.prompts_per_iteration:,} prompts x {own.group_size} responses in {own.n_minibatches} minibatches"
    bound = f"no schedule ends before {runs[0].bound.bound_s:.1f} s"
    assumptions = [[row["key"], plain(row["value"]), row["source"]] for row in assumption_rows(scenario)]
    return Page(
        title=f"{scenario.name}: one simulated iteration on {counted(num_gpus, 'GPU')}",
        subtitle=f"{samples}, seed {runs[0].seed}; {bound} (lengths known, moves free, GPUs fractional)",
        strips=[_strip(run, summary, found[0].policy) for run, summary in zip(runs, found, strict=True)],
        head=[_summary_table(found)],
        foot=[Table("Assumptions", ("field", "value", "source"), assumptions, note=SOURCES_LEGEND, is_folded=True)],
    )


def _of_policy(event: dict[str, Any], policy: str) -> dict[str, Any]:
    if event["name"] != "process_name":
        return event
    return event | {"args": {"name": f"{policy} {event['args']['name']}"}}


def _decision_events(run: Run, *, pid: int) -> Iterator[dict[str, Any]]:
    """Decisions as instant events of the policy's first process."""
    for decided in run.decisions:
        details = {"reason": decided.reason, "predicted_end_s": decided.predicted_end_s}
        at_us = decided.at_s * 1e6
        yield mark_event(at_us, "decision", details, pid=pid)


def _summary_table(found: Sequence[Summary]) -> Table:
    first = found[0].policy
    states = [f"{state} %" for state in found[0].state_percent]
    columns = ["policy", "iteration s", f"times {first}", "above bound %", *states, "moves", "lost samples"]
    rows = [
        [
            each.policy,
            f"{each.iteration_s:,.1f}",
            f"{each.speedup:.3f}",
            f"{each.over_bound_percent:.1f}",
            *(f"{share:.1f}" for share in each.state_percent.values()),
            f"{each.num_moves:,}",
            f"{each.num_lost:,}",
        ]
        for each in found
    ]
    return Table("Policies", columns, rows, note="Per cent of a state: of all GPUs' time until the iteration's end.")


def _strip(run: Run, summary: Summary, first: str) -> Strip:
    facts = f"{run.iteration_s:.1f} s"
    facts += f", {summary.speedup:.2f} times as fast as {first}" if run.policy != first else ""
    facts += f", {summary.over_bound_percent:.0f} % above the bound, {counted(run.num_moves, 'move')}"
    rows = [[plain(value) for value in _decision_row(decided).values()] for decided in run.decisions]
    columns = ("at s", "rollout", "actor", "inference", "predicted end s", "reason")
    decisions = Table(counted(len(rows), "decision"), columns, rows, is_folded=True)
    marks = sorted(_marks(run), key=lambda mark: mark.at_ns)
    return Strip(run.policy, facts, _window(run), lanes_of(run), marks, [decisions] if rows else [])


def _marks(run: Run) -> Iterator[Mark]:
    for happening in run.history:
        if happening.what is What.MINIBATCH_FINISHED:
            text = f"minibatch {happening.number + 1} ends, {happening.count:,} tokens"
            yield Mark(round(happening.at_s * NS_PER_S), MarkKind.BOUNDARY, text)
    for decided in run.decisions:
        yield Mark(round(decided.at_s * NS_PER_S), MarkKind.DECISION, decided.reason)
    yield Mark(round(run.bound.bound_s * NS_PER_S), MarkKind.REFERENCE, "the bound: no schedule ends before")


def _decision_row(decided: PolicyDecision) -> dict[str, Any]:
    """The GPUs of each component after the decision."""
    chosen = decided.assignment
    return {
        "at_s": decided.at_s,
        "rollout_gpus": sum(map(len, chosen.engines)),
        "actor_gpus": len(chosen.trainer.gpus) if chosen.trainer else 0,
        "inference_gpus": len(chosen.inference),
        "predicted_end_s": decided.predicted_end_s,
        "reason": decided.reason,
    }


def missed_fault(policy: str, missed: Happening) -> str:
    """A line about a fault that had nothing to strike."""
    if missed.gpus:
        node = node_of(missed.gpus[0])
        return f"{policy}: node {node}, which was to be lost at {missed.at_s:g} s, is lost already then"
    return (
        f"{policy}: engine {missed.number}, which was to fail at {missed.at_s:g} s, does not run then; "
        f"{missed.count} others do; engines are numbered from 0 as they start"
    )


def plain(value: Any) -> str:
    """A figure as people write it. An empty text for None."""
    if value is None or value == {}:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _window(run: Run) -> Window:
    return Window(0, round(run.iteration_s * NS_PER_S))
