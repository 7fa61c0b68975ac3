"""Policies on one simulated iteration: `python -m benchmarks.iteration_sim [--json] [--quick] [--save]`.

A ratio compares runs on the same lengths:

    X_vs_Y   = seconds of Y / seconds of X
    X_over_Y = seconds of X / seconds of Y

1. The grid (`benchmarks/iteration_grid.py`): a 7B job on 64 GPUs with computed physics, which the cells vary. Its
   figures are medians over the cells, and `_min` and `_max` the range over cells and seeds. Figures that end with
   `_fixed` are of the cells with fixed minibatches.
2. The cells beside the best schedule of a search that knows the lengths and pays for every switch
   (`benchmarks/iteration_best.py`): no policy can gain much more than these figures say. `best_schedule_vs_X` stands
   beside `tide_vs_X`, and `best_schedule_in_worst_cell` beside `worst_cell_vs_best_other`. A search that makes
   its orders from hints gives `best_by_hints_vs_best_other_fixed`. `X_over_clairvoyant` is of
   the base cell alone, and `bound_vs_X` of the bound that no schedule beats (`simulator/bound.py`).
3. The published iteration (`published_...`), `examples/scenarios/published_64gpu.yaml`. Its costs were fitted on seeds
   0 to 9, so it runs on 10 to 19. The fit counts while `static_off_published`, `dynarl_off_published` and
   `dynarl_priority_off_published` meet their goals: the distances of medians from the published 985 s, 1.34 and 1.46.
4. The cost of simulating.

It takes an hour on two cores. A stopped run goes on where it was, at the same commit (`benchmarks/parts.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from statistics import median
from typing import Any

from benchmarks.clairvoyant.search import clairvoyant_schedule
from benchmarks.contenders import COMPARED, SCENARIO, compared, contenders, policies, ratios
from benchmarks.direct import simulate
from benchmarks.iteration_best import best_case, by_hints_figures, searched_case, worst_cell_best
from benchmarks.iteration_grid import BASE, CELLS, figures_of
from benchmarks.parts import kept_in, part
from benchmarks.report import Report, arguments, publish, spread
from services.scheduler.policy.static import StaticPolicy
from simulator.policies import Contender, policies_of
from simulator.scenario import Scenario, load_scenario

PUBLISHED_SEEDS = range(10, 20)
PUBLISHED_S, PUBLISHED_DYNARL, PUBLISHED_PRIORITY = 985.0, 1.34, 1.46
EVALUATIONS, QUICK_EVALUATIONS = 200, 18
"""The number of schedules that the clairvoyant search runs."""
NUM_SEARCHED = 3
"""The seeds of the published iteration with a clairvoyant search, which takes as long as a hundred policies."""
BESIDE_CLAIRVOYANT = ("phases_ordered", "best_split", "dynarl", "tide")
BEGINS = ("rlinf", "dynarl", "dynarl_priority", "fused_ordered", "phases_ordered")
"""Policies at whose schedules a full search begins, besides tide's and the fixed split's."""

GOALS = {
    "tide_vs_best_split": ">= 1.10",
    "tide_vs_best_other": ">= 1.05",
    "tide_vs_phases_ordered": ">= 1.25",
    "worst_cell_vs_best_other": ">= 0.99",
    "tide_vs_best_other_fixed": ">= 1.03",
    "static_off_published": "<= 0.05",
    "dynarl_off_published": "<= 0.05",
    "dynarl_priority_off_published": "<= 0.05",
    "published_tide_over_clairvoyant": "<= 1.08",
    "sim_s": "<= 5",
    "sim_1024_s": "<= 60",
    "sim_1024_gib": "<= 2",
}


def clairvoyant(scenario: Scenario, seed: int, *, is_quick: bool = False) -> dict[str, Any]:
    """The best schedule, as a case has it."""
    if is_quick:
        found = clairvoyant_schedule(scenario, seed=seed, evaluations=QUICK_EVALUATIONS)
    else:
        policies_there = {**policies_of(BEGINS, scenario), "static split": StaticPolicy()}
        others = {name: Contender(scenario, policy) for name, policy in policies_there.items()}
        found = clairvoyant_schedule(scenario, seed=seed, evaluations=EVALUATIONS, others=others)
    own = found.schedule
    return {
        "clairvoyant_s": found.seconds,
        "clairvoyant_from": found.origin,
        "clairvoyant_found_by_evaluation": found.nth,
        "start_s": own.start_s,
        "trainer_gpus": own.trainer,
        "inference_gpus": own.inference,
        "waits": own.waits,
    }


def spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By key of the rows: the median, `_min` and `_max`."""
    figures: dict[str, float] = {}
    for key in rows[0]:
        found = spread([row[key] for row in rows])
        figures |= {key: found["median"], f"{key}_min": found["min"], f"{key}_max": found["max"]}
    return figures


def beside_clairvoyant(base: Mapping[str, Any], found_s: Sequence[float]) -> dict[str, float]:
    """The figures of the base cell. `base`: its case; `found_s`: the best schedules' seconds, by its seeds.

    A policy that ends sooner than the best schedule takes its place: the search opens in fewer ways than policies do.
    """
    by_seed_s = base["by_seed_s"]
    rows = []
    for at, seconds in enumerate(found_s):
        best_s = min(seconds, *(by_seed_s[name][at] for name in COMPARED))
        rows.append({f"{name}_over_clairvoyant": by_seed_s[name][at] / best_s for name in BESIDE_CLAIRVOYANT})
    return spreads(rows)


def published_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The ratios of the published iteration, and the distances of the baselines from what was published."""
    figures = spreads([ratios(row) for row in rows])
    searched = [{"tide_over_clairvoyant": row["tide"] / row["clairvoyant"]} for row in rows if "clairvoyant" in row]
    figures |= spreads(searched)
    static_s = median(row["static"] for row in rows)
    return {
        **{f"published_{key}": value for key, value in figures.items()},
        "published_static_s": static_s,
        "static_off_published": abs(static_s / PUBLISHED_S - 1),
        "dynarl_off_published": abs(figures["dynarl_vs_static"] / PUBLISHED_DYNARL - 1),
        "dynarl_priority_off_published": abs(figures["dynarl_priority_vs_static"] / PUBLISHED_PRIORITY - 1),
    }


def costs_of_simulating(scenario: Scenario) -> dict[str, float]:
    """The cost of simulating: one published iteration under `tide`, the slowest policy, and the large iteration in a
    process of its own."""
    policy = policies(scenario)["tide"]
    began = time.perf_counter()
    simulate(scenario, policy, seed=PUBLISHED_SEEDS[0])
    took_s = time.perf_counter() - began
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.iteration_large"], capture_output=True, text=True, check=True
    )
    return {"sim_s": took_s, **json.loads(done.stdout)}


def main() -> int:
    options = arguments("Policies on one iteration, simulated over a grid of physics.")
    is_quick = options.quick
    published = load_scenario(SCENARIO)
    cells = CELLS[:1] if is_quick else CELLS
    seeds = PUBLISHED_SEEDS[:1] if is_quick else PUBLISHED_SEEDS
    base_seeds = BASE.seeds[:1] if is_quick else BASE.seeds
    kept = None if is_quick else kept_in("iteration_sim")
    with ProcessPoolExecutor() as pool:
        among = pool.submit(contenders, published)

        def searches(name: str, scenario: Scenario, seeds: Sequence[int]) -> dict[int, Future[Any]]:
            return {
                seed: pool.submit(part, kept, f"{name} {seed}", clairvoyant, scenario, seed, is_quick=is_quick)
                for seed in seeds
            }

        of_base = searches("search base", BASE.scenario(), base_seeds)
        of_published = searches("search published", published, seeds[:NUM_SEARCHED])
        grid = [
            pool.submit(
                part,
                kept,
                cell.name,
                searched_case,
                cell,
                cell.seeds[:1] if is_quick else cell.seeds,
                is_searched=cell is not BASE,
            )
            for cell in cells
        ]
        seconds = {
            seed: pool.submit(part, kept, f"published {seed}", compared, among.result(), seed, directly=True)
            for seed in seeds
        }
    cases = [each.result() for each in grid]
    found = {seed: each.result() for seed, each in of_base.items()}
    rows = {seed: each.result() for seed, each in seconds.items()}
    searched = {seed: each.result() for seed, each in of_published.items()}
    for seed, each in searched.items():
        rows[seed]["clairvoyant"] = each["clairvoyant_s"]
    cases[0] |= best_case(
        cases[0], {seed: (each["clairvoyant_s"], each["clairvoyant_from"]) for seed, each in found.items()}
    )
    own_s = [each["clairvoyant_s"] for each in found.values()]
    figures = figures_of(cases) | beside_clairvoyant(cases[0], own_s) | published_figures(list(rows.values()))
    figures |= {"best_schedule_in_worst_cell": worst_cell_best(cases), **by_hints_figures(cases)}
    figures |= costs_of_simulating(published)
    cases += [{"case": f"base, seed {seed}, clairvoyant", **each} for seed, each in found.items()]
    for seed, row in rows.items():
        cases.append({"case": f"published, seed {seed}", **{f"{key}_s": value for key, value in row.items()}})
    cases += [{"case": f"published, seed {seed}, clairvoyant", **each} for seed, each in searched.items()]
    report = Report(
        name="iteration_sim",
        figures=figures,
        goals={key: goal for key, goal in GOALS.items() if not is_quick or key in figures},
        cases=cases,
        against="the same lengths under the other policies, a search with the future, and what DynaRL published",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
