"""Simulated jobs of several iterations: a table with a row for each policy, or one value with a row for each iteration.

Invariant: both forms have the same figures. [test_job_report: the_value_has_the_figures_of_the_table]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from cli.rows import Form, Row, rounded, table, written
from cli.simulation.run_report import assumption_rows, missed_fault
from simulator.job_run import IterationRow, JobRun
from simulator.scenario import Scenario, ScenarioError
from tidegate.timeline_page.page import STATES

FORMS = tuple(Form)


def check_form(form: str) -> None:
    """ScenarioError for a form that shows one iteration alone."""
    if form not in FORMS:
        forms = f"{', '.join(FORMS[:-1])} or {FORMS[-1]}"
        raise ScenarioError(f"-o {form} shows one iteration, and --iterations gives several: use -o {forms}")


def output(scenario: Scenario, runs: Sequence[JobRun], form: Form) -> list[str]:
    if form is not Form.TABLE:
        return [written(as_value(scenario, runs), form)]
    rows = [_table_row(run, runs) for run in runs]
    first = runs[0].rows
    lines = [
        f"{scenario.name}, seed {runs[0].seed}: {len(first)} iterations; the mean length goes from "
        f"{first[0].mean_tokens:,.0f} to {first[-1].mean_tokens:,.0f} tokens",
        *(missed_fault(run.policy, each) for run in runs for row in run.rows for each in row.missed_faults),
    ]
    return [table(rows, tuple(rows[0])), "\n".join(lines)]


def as_value(scenario: Scenario, runs: Sequence[JobRun]) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "seed": runs[0].seed,
        "num_gpus": runs[0].num_gpus,
        "num_iterations": len(runs[0].rows),
        "compared_with": runs[0].policy,
        "policies": [_figures(run, runs) | {"iterations": [_iteration(row) for row in run.rows]} for run in runs],
        "assumptions": assumption_rows(scenario),
    }


def _figures(run: JobRun, runs: Sequence[JobRun]) -> dict[str, Any]:
    seconds = [row.seconds for row in run.rows]
    return {
        "policy": run.policy,
        "total_s": round(run.total_s, 3),
        "speedup": round(runs[0].total_s / run.total_s, 4),
        "iteration_s_median": round(median(seconds), 3),
        "iteration_s_first": round(seconds[0], 3),
        "iteration_s_last": round(seconds[-1], 3),
        "tokens_per_s": rounded(run.num_tokens / run.total_s),
        **{f"{state}_percent": round(share, 3) for state, share in _state_percent(run, runs)},
        "num_moves": run.num_moves,
        "num_samples": sum(row.num_samples for row in run.rows),
        "num_filtered": sum(row.num_filtered for row in run.rows),
        "num_lost": sum(row.num_lost for row in run.rows),
    }


def _table_row(run: JobRun, runs: Sequence[JobRun]) -> Row:
    found = _figures(run, runs)
    return {
        "policy": run.policy,
        "seconds": round(found["total_s"], 1),
        "speedup": f"{found['speedup']:.3f}",
        "median_s": round(found["iteration_s_median"], 1),
        "first_s": round(found["iteration_s_first"], 1),
        "last_s": round(found["iteration_s_last"], 1),
        "tokens_per_s": round(found["tokens_per_s"]),
        **{f"{state}_%": round(share, 1) for state, share in _state_percent(run, runs)},
        "moves": run.num_moves,
        "lost_samples": found["num_lost"],
    }


def _state_percent(run: JobRun, runs: Sequence[JobRun]) -> Iterator[tuple[str, float]]:
    """The share of all GPUs' time in each state that occurs in any of the runs."""
    total = run.total_s * run.num_gpus
    for state in STATES:
        if any(each.gpu_s.get(state) for each in runs):
            yield state, 100 * run.gpu_s.get(state, 0.0) / total


def _iteration(row: IterationRow) -> dict[str, Any]:
    figures = {name: value for name, value in asdict(row).items() if name not in ("gpu_s", "missed_faults")}
    found = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    return found | {"gpu_s": {state: round(seconds, 3) for state, seconds in row.gpu_s.items()}}
