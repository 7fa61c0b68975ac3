"""Simulated asynchronous trainings: a row for each way to share the GPUs.

    split       the scenario's placement, fixed
    best_split  the fixed split that a search finds on lengths of its own, like those of the first iterations
    tide        from `best_split`, balanced after each iteration

Invariant: every form has the same figures. [test_async_report: the_value_has_the_figures_of_the_table]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from cli.rows import Form, Row, rounded, table, written
from cli.simulation.run_report import assumption_rows
from services.scheduler.policy.balance import Split
from simulator.asynchrony.course import Asynchrony
from simulator.asynchrony.run import AsyncRun, simulate_async, split_of
from simulator.asynchrony.search import num_tuned, tuned_split
from simulator.job_iterations import SimulatedJob
from simulator.lengths import Lengths
from simulator.scenario import Scenario, ScenarioError

NAMES = ("split", "best_split", "tide")
_SEED_OF_TUNING = 1_000_003
"""Added to the seed: no length that is simulated is seen by the search."""


def check_names(names: Sequence[str]) -> None:
    """ScenarioError for a name that has no asynchronous training."""
    if wrong := [name for name in names if name not in NAMES]:
        raise ScenarioError(
            f"{', '.join(wrong)} has no asynchronous training, whose GPUs are shared by {', '.join(NAMES)}: compare "
            "these, or leave --staleness out"
        )


def simulated(
    scenario: Scenario, rules: Asynchrony, names: Sequence[str], *, num_iterations: int, seed: int
) -> dict[str, AsyncRun]:
    """The trainings in the order of `names`. ScenarioError: the scenario's placement is no start."""
    lengths = _lengths(scenario, num_iterations, seed)
    start = split_of(scenario)
    if set(names) != {"split"}:
        start = tuned_split(scenario, rules, _lengths(scenario, num_tuned(rules), seed + _SEED_OF_TUNING))

    def run(name: str) -> AsyncRun:
        split = split_of(scenario) if name == "split" else start
        return simulate_async(scenario, rules, lengths, split=split, balances=name == "tide")

    return {name: run(name) for name in names}


def _lengths(scenario: Scenario, num_iterations: int, seed: int) -> list[Lengths]:
    job = SimulatedJob(scenario, num_iterations, seed)
    return [job.iteration(number).workload.lengths for number in range(num_iterations)]


def output(scenario: Scenario, rules: Asynchrony, runs: dict[str, AsyncRun], form: Form) -> list[str]:
    if form is not Form.TABLE:
        return [written(as_value(scenario, rules, runs), form)]
    rows = [_table_row(name, run, runs) for name, run in runs.items()]
    head = f"{scenario.name}: {len(_first(runs).iteration_s)} iterations, staleness at most {rules.staleness}"
    return [table(rows, tuple(rows[0])), "\n".join([f"{head}, {rules.on_new_weights}", *_splits(runs)])]


def as_value(scenario: Scenario, rules: Asynchrony, runs: dict[str, AsyncRun]) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "num_iterations": len(_first(runs).iteration_s),
        "staleness": rules.staleness,
        "on_new_weights": rules.on_new_weights,
        "compared_with": next(iter(runs)),
        "policies": [
            _figures(name, run, runs)
            | {
                "tokens_by_staleness": {str(each): tokens for each, tokens in run.staleness.items()},
                "splits": [{"at_s": round(at_s, 3), **_split(split)} for at_s, split in run.splits],
                "iteration_s": [round(each, 3) for each in run.iteration_s],
            }
            for name, run in runs.items()
        ],
        "assumptions": assumption_rows(scenario),
    }


def _first(runs: dict[str, AsyncRun]) -> AsyncRun:
    return next(iter(runs.values()))


def _figures(name: str, run: AsyncRun, runs: dict[str, AsyncRun]) -> dict[str, Any]:
    return {
        "policy": name,
        "total_s": round(run.seconds, 3),
        "speedup": round(_first(runs).seconds / run.seconds, 4),
        "iteration_s_median": round(median(run.iteration_s), 3),
        "iteration_s_first": round(run.iteration_s[0], 3),
        "iteration_s_last": round(run.iteration_s[-1], 3),
        "tokens_per_s": rounded(run.tokens_per_s),
        "staleness_mean": round(sum(each * tokens for each, tokens in run.staleness.items()) / run.num_tokens, 4),
        "staleness_max": max(run.staleness),
        "num_moves": len(run.splits) - 1,
    }


def _table_row(name: str, run: AsyncRun, runs: dict[str, AsyncRun]) -> Row:
    found = _figures(name, run, runs)
    return {
        "policy": name,
        "seconds": round(found["total_s"], 1),
        "speedup": f"{found['speedup']:.3f}",
        "median_s": round(found["iteration_s_median"], 1),
        "first_s": round(found["iteration_s_first"], 1),
        "last_s": round(found["iteration_s_last"], 1),
        "tokens_per_s": round(found["tokens_per_s"]),
        "staleness": f"{found['staleness_mean']:.2f}",
        "moves": found["num_moves"],
    }


def _splits(runs: dict[str, AsyncRun]) -> Iterator[str]:
    for name, run in runs.items():
        last = f"; at the end {run.splits[-1][1]}" if len(run.splits) > 1 else ""
        yield f"{name}: {run.splits[0][1]}{last}"


def _split(split: Split) -> dict[str, int]:
    return {"engines": split.engines, "copies": split.copies, "inference_gpus": split.inference}
