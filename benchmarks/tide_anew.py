"""`tide` as it is now, on the saved iterations: `python -m benchmarks.tide_anew [--json] [--save]`.

`iteration_sim` takes two hours, mostly for policies and searches that a change of `tide` leaves as they are. This runs
`tide` and its first plan alone, and takes the others from the saved result. A simulation gives the same seconds each
time: ordered phases run too, and where one of them differs by a bit the benchmark stops, for then all have to run.

The figures have the names and goals of `iteration_sim`. The best schedules are those that were found beside the earlier
`tide`, or its own where it is faster now. `was_X` is the saved figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.contenders import OWN, SCENARIO, ratios
from benchmarks.direct import simulate
from benchmarks.iteration_best import best_by_hints, best_case, by_hints_figures, worst_cell_best
from benchmarks.iteration_grid import CELLS, Cell, case_from, figures_of
from benchmarks.iteration_sim import GOALS, PUBLISHED_SEEDS
from benchmarks.report import RESULTS, Report, arguments, publish, spread
from simulator.policies import policies_of
from simulator.scenario import Scenario, load_scenario

CHECK = "phases_ordered"
PUBLISHED = "published, seed "


class SavedIsOld(RuntimeError):
    """The saved seconds are not those of this code."""


def seconds_of(scenario: Scenario, seed: int, saved: Mapping[str, float]) -> dict[str, float]:
    """The saved seconds with those of `tide` and its first plan as they are now. SavedIsOld."""
    found = {
        name: simulate(scenario, policy, name=name, seed=seed, directly=True).iteration_s
        for name, policy in policies_of((CHECK, *OWN), scenario).items()
    }
    if found[CHECK] != saved[CHECK]:
        raise SavedIsOld(
            f"{CHECK} takes {found[CHECK]!r} s at seed {seed}, and saved are {saved[CHECK]!r}: run "
            "python -m benchmarks.iteration_sim --save"
        )
    return {**saved, **found}


def cell_case(cell: Cell, saved: Mapping[str, Any]) -> dict[str, Any]:
    by_seed_s: Mapping[str, Sequence[float]] = saved["by_seed_s"]
    rows = [
        seconds_of(cell.scenario(), seed, {name: each[at] for name, each in by_seed_s.items()})
        for at, seed in enumerate(saved["seeds"])
    ]
    case = case_from(cell, saved["seeds"], rows, split=saved["split"])
    best = zip(saved["best_schedule_seeds"], saved["best_schedule_s"], saved["best_schedule_from"], strict=True)
    by_hints = zip(saved.get("best_by_hints_seeds", ()), saved.get("best_by_hints_s", ()), strict=True)
    found = {seed: (seconds, origin) for seed, seconds, origin in best}
    return case | best_case(case, found) | best_by_hints(case, dict(by_hints))


def published_case(saved: Mapping[str, Any]) -> dict[str, float]:
    seconds = {key.removesuffix("_s"): value for key, value in saved.items() if key.endswith("_s")}
    return seconds_of(load_scenario(SCENARIO), int(saved["case"].removeprefix(PUBLISHED)), seconds)


def main() -> int:
    options = arguments("tide as it is now, beside the saved seconds of the others.")
    saved = json.loads((RESULTS / "iteration_sim.json").read_text())
    by_name = {case["case"]: case for case in saved["cases"]}
    cells = CELLS[:1] if options.quick else CELLS
    published = [by_name[f"{PUBLISHED}{seed}"] for seed in PUBLISHED_SEEDS]
    with ProcessPoolExecutor() as pool:
        grid = [pool.submit(cell_case, cell, by_name[cell.name]) for cell in cells]
        rows = [pool.submit(published_case, case) for case in published[: 1 if options.quick else None]]
    cases = [each.result() for each in grid]
    figures = figures_of(cases) | {"best_schedule_in_worst_cell": worst_cell_best(cases), **by_hints_figures(cases)}
    for key, values in _columns([ratios(row.result()) for row in rows]).items():
        figures[f"published_{key}"] = spread(values)["median"]
    goals = {key: goal for key, goal in GOALS.items() if key in figures}
    figures |= {f"was_{key}": saved["figures"][key] for key in goals}
    report = Report(
        name="tide_anew",
        figures=figures,
        goals=goals,
        cases=cases,
        against=f"the other policies and the searches of iteration_sim at {saved['commit']}, on the same lengths",
    )
    return publish(report, options)


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


if __name__ == "__main__":
    sys.exit(main())
