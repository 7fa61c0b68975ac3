"""The best schedules of the grid's cells, as far as a search with the future finds them (`clairvoyant/search.py`).

    best_schedule_vs_X = seconds of X / seconds of the best schedule

on the same lengths. The search begins at the schedules of `tide`, of the fastest other and of ordered phases. A policy
that ends sooner than the search finds is the best schedule itself, so no ratio is below 1.

In the cells of the fixed order a second search makes its orders from hints, as policies do. Its figure is
`best_by_hints_vs_best_other`. It still chooses among orders, times and numbers of GPUs by what comes out, and sorts
returned sequences by their true lengths.

The base cell is searched longest, on each of its seeds. A search elsewhere has fewer schedules. It is on two seeds of
the cells that count apart, those of the fixed order and `WEAK`, and on one seed of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
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
BY_HINTS = "best_by_hints_vs_best_other"


def searched_case(cell: Cell, seeds: Sequence[int], *, is_searched: bool = True) -> dict[str, Any]:
    """The cell's case with its best schedules. `is_searched`: not of a cell that is searched elsewhere."""
    among = contenders(cell.scenario())
    case = case_of(cell, seeds, among)
    if not is_searched:
        return case
    found, found_by_hints = {}, {}
    for at, seed in enumerate(seeds[: 2 if cell.is_fixed or cell.name in WEAK else 1]):
        names = dict.fromkeys((fastest_other(case, at), "phases_ordered"))
        searched = partial(
            clairvoyant_schedule,
            cell.scenario(),
            seed=seed,
            evaluations=EVALUATIONS_A_CELL,
            others={name: among[name] for name in names},
        )
        found[seed] = searched()
        if cell.is_fixed:
            found_by_hints[seed] = searched(by_hints=True).seconds
    return case | best_schedules(case, found) | best_by_hints(case, found_by_hints)


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


def best_by_hints(case: Mapping[str, Any], found_s: Mapping[int, float]) -> dict[str, Any]:
    """What a case has of the best schedules with orders by hints. `found_s`: their seconds by seed; none: no search."""
    rows = []
    for seed, seconds in found_s.items():
        at = case["seeds"].index(seed)
        best_s = min(seconds, *(case["by_seed_s"][name][at] for name in COMPARED))
        rows.append((best_s, case["by_seed_s"][fastest_other(case, at)][at] / best_s))
    if not rows:
        return {}
    return {"best_by_hints_seeds": list(found_s), "best_by_hints_s": [each[0] for each in rows]} | {
        BY_HINTS: [each[1] for each in rows]
    }


def by_hints_figures(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median over the cells that have such a search, and the range."""
    searched = [case[BY_HINTS] for case in cases if BY_HINTS in case]
    if not searched:
        return {}
    every = [value for values in searched for value in values]
    name = f"{BY_HINTS}_fixed"
    return {name: median(map(median, searched)), f"{name}_min": min(every), f"{name}_max": max(every)}


def worst_cell_best(cases: Sequence[Mapping[str, Any]]) -> float:
    """`best_schedule_vs_best_other` of the cell in which `tide_vs_best_other` is lowest."""
    worst = min(cases, key=lambda case: median(case["tide_vs_best_other"]))
    ratios: Sequence[float] = worst[f"{BEST}best_other"]
    return median(ratios)
