"""The best schedules of the grid's cells, as far as a search with the future finds them (`clairvoyant/search.py`).

    best_schedule_vs_X = seconds of X / seconds of the best schedule

on the same lengths. The search begins at the schedules of `tide`, of the fastest other and of ordered phases. A policy
that ends sooner than the search finds is the best schedule itself, so no ratio is below 1.

The base cell is searched longest, on each of its seeds. A search elsewhere has fewer schedules. It is on two seeds of
the cells that count apart, those of the fixed order and `WEAK`, and on one seed of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.clairvoyant.search import Found, clairvoyant_schedule
from benchmarks.contenders import COMPARED, contenders, rivals
from benchmarks.iteration_grid import Cell, case_of

EVALUATIONS_A_CELL = 60
"""Schedules that a search of a cell runs, besides the base cell's."""
WEAK = ("32B", "wide groups")
"""The cells in which `tide` was slowest beside the others when the search was added."""
BEST = "best_schedule_vs_"


def searched_case(cell: Cell, seeds: Sequence[int], *, is_searched: bool = True) -> dict[str, Any]:
    """The cell's case with its best schedules. `is_searched`: not of a cell that is searched elsewhere."""
    among = contenders(cell.scenario())
    case = case_of(cell, seeds, among)
    if not is_searched:
        return case
    found = {}
    for at, seed in enumerate(seeds[: 2 if cell.is_fixed or cell.name in WEAK else 1]):
        names = dict.fromkeys((fastest_other(case, at), "phases_ordered"))
        found[seed] = clairvoyant_schedule(
            cell.scenario(), seed=seed, evaluations=EVALUATIONS_A_CELL, others={name: among[name] for name in names}
        )
    return case | best_schedules(case, found)


def fastest_other(case: Mapping[str, Any], at: int) -> str:
    """The fastest policy besides `tide` on the case's seed at this place."""
    seconds = rivals({name: by_seed[at] for name, by_seed in case["by_seed_s"].items()})
    return min(seconds, key=seconds.__getitem__)


def best_schedules(case: Mapping[str, Any], found: Mapping[int, Found]) -> dict[str, Any]:
    """What a case has of the best schedules. `found`: by seed, of some seeds of the case."""
    return best_case(case, {seed: (each.seconds, each.origin) for seed, each in found.items()})


def best_case(case: Mapping[str, Any], found: Mapping[int, tuple[float, str]]) -> dict[str, Any]:
    """The same of the schedules' seconds, and of where each search found it."""
    rows = []
    for seed, (found_s, origin) in found.items():
        at = case["seeds"].index(seed)
        seconds = {name: case["by_seed_s"][name][at] for name in COMPARED}
        first = min(seconds, key=seconds.__getitem__)
        best_s = min(found_s, seconds[first])
        rows.append(
            {
                "best_schedule_s": best_s,
                "best_schedule_from": origin if found_s == best_s else first,
                f"{BEST}best_other": seconds[fastest_other(case, at)] / best_s,
                **{f"{BEST}{name}": seconds[name] / best_s for name in ("tide", "phases_ordered")},
            }
        )
    return {"best_schedule_seeds": list(found), **{key: [row[key] for row in rows] for key in rows[0]}}


def worst_cell_best(cases: Sequence[Mapping[str, Any]]) -> float:
    """`best_schedule_vs_best_other` of the cell in which `tide_vs_best_other` is lowest."""
    worst = min(cases, key=lambda case: median(case["tide_vs_best_other"]))
    ratios: Sequence[float] = worst[f"{BEST}best_other"]
    return median(ratios)
