"""`tide` where minibatches have a fixed order, on enough seeds to tell a percent:
`python -m benchmarks.fixed_order [--json] [--save]`.

There the gain is small, and from seed to seed it varies by 2 to 3 %: the median of the five seeds that a cell has in
`iteration_sim` may be off by more than the gain. This has `SEEDS` further seeds of each such cell, on which nothing was
chosen, and compares `tide` with the three policies that were the fastest others there on every seed. `_low` and `_high`
of a figure are those between which it is in 90 % of draws of as many seeds from these, with replacement.

On the first `SEARCHED` seeds of a cell a search with the future (`clairvoyant/search.py`) shows what is left:
`best_schedule_vs_best_other`, and beside it `tide_vs_best_other_there`, of the same seeds.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

from benchmarks.clairvoyant.search import clairvoyant_schedule
from benchmarks.contenders import compared
from benchmarks.iteration_best import EVALUATIONS_A_CELL
from benchmarks.iteration_grid import CELLS, Cell
from benchmarks.parts import kept_in, part
from benchmarks.report import Report, arguments, publish
from simulator.policies import contenders_of

FIRST_SEED, SEEDS, SEARCHED = 1200, 20, 4
QUICK_SEEDS, QUICK_SEARCHED = 2, 0
OTHERS = ("phases_ordered", "fused", "fused_ordered")
DRAWS = 2000
GOALS = {"tide_vs_best_other": ">= 1.03"}


def seconds_of(cell: Cell, seed: int) -> dict[str, float]:
    return compared(contenders_of((*OTHERS, "tide"), cell.scenario()), seed, directly=True)


def best_of(cell: Cell, seed: int) -> float:
    scenario = cell.scenario()
    others = contenders_of(OTHERS, scenario)
    return clairvoyant_schedule(scenario, seed=seed, evaluations=EVALUATIONS_A_CELL, others=others).seconds


def case_of(cell: Cell, rows: Mapping[int, Mapping[str, float]], found_s: Mapping[int, float]) -> dict[str, Any]:
    """`rows`: the seconds by seed. `found_s`: those of the best schedules, of the first seeds."""

    def best_other(seed: int) -> float:
        return min(rows[seed][name] for name in OTHERS)

    return {
        "case": cell.name,
        "seeds": list(rows),
        "by_seed_s": {name: [row[name] for row in rows.values()] for name in (*OTHERS, "tide", "bound")},
        "tide_vs_best_other": [best_other(seed) / row["tide"] for seed, row in rows.items()],
        "tide_vs_fused_ordered": [row["fused_ordered"] / row["tide"] for row in rows.values()],
        "best_schedule_vs_best_other": [
            best_other(seed) / min(seconds, best_other(seed), rows[seed]["tide"]) for seed, seconds in found_s.items()
        ],
        "tide_vs_best_other_there": [best_other(seed) / rows[seed]["tide"] for seed in found_s],
    }


def figures_of(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the cells of their medians over seeds."""
    figures: dict[str, float] = {}
    for key in ("tide_vs_best_other", "tide_vs_fused_ordered"):
        by_cell: list[list[float]] = [case[key] for case in cases]
        low, high = _likely(by_cell)
        figures |= {key: _median(by_cell), f"{key}_low": low, f"{key}_high": high}
    for key in ("best_schedule_vs_best_other", "tide_vs_best_other_there"):
        if all(case[key] for case in cases):
            figures[key] = _median([case[key] for case in cases])
    return figures


def _median(by_cell: Sequence[Sequence[float]]) -> float:
    return median(map(median, by_cell))


def _likely(by_cell: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Between which the median is in 90 % of draws."""
    chance = random.Random(0)
    drawn = sorted(_median([chance.choices(of, k=len(of)) for of in by_cell]) for _ in range(DRAWS))
    return drawn[DRAWS // 20], drawn[-DRAWS // 20 - 1]


def main() -> int:
    options = arguments("tide in a fixed order, on enough seeds to tell a percent.")
    num_seeds, num_searched = (QUICK_SEEDS, QUICK_SEARCHED) if options.quick else (SEEDS, SEARCHED)
    cells = [cell for cell in CELLS if cell.is_fixed]
    seeds = {cell.name: range(first := FIRST_SEED + SEEDS * at, first + num_seeds) for at, cell in enumerate(cells)}
    kept = None if options.quick else kept_in("fixed_order")
    with ProcessPoolExecutor() as pool:
        rows, found = (
            {
                (cell.name, seed): pool.submit(part, kept, f"{what} {cell.name} {seed}", make, cell, seed)
                for cell in cells
                for seed in seeds[cell.name][:most]
            }
            for what, make, most in (("seconds", seconds_of, num_seeds), ("search", best_of, num_searched))
        )
    cases = [
        case_of(
            cell,
            {seed: rows[cell.name, seed].result() for seed in seeds[cell.name]},
            {seed: found[cell.name, seed].result() for seed in seeds[cell.name][:num_searched]},
        )
        for cell in cells
    ]
    report = Report(
        name="fixed_order",
        figures=figures_of(cases),
        goals={} if options.quick else GOALS,
        cases=cases,
        against="the fastest of three other policies, chosen anew on each seed, and a search with the future",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
