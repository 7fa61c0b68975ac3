"""The published 64-GPU iteration under each policy: `python -m benchmarks.iteration_sim [--json] [--quick] [--save]`.

One scenario file, `examples/scenarios/published_64gpu.yaml`, has the costs for every policy. Its fields were fixed on
seeds 0 to 9, so the comparison runs on seeds 10 to 19. A ratio compares runs on the same lengths:

    X_vs_Y   = seconds of Y / seconds of X
    X_over_Y = seconds of X / seconds of Y

Figures are medians over the seeds, and `_min` and `_max` their range. `clairvoyant` is the best schedule of a search
that knows the lengths and pays for every switch. `best_split` and the other baselines are those of
`simulator/baselines.py`; the split is searched once, on seeds of its own. The comparison counts only while
`static_off_published`, `dynarl_off_published` and `dynarl_priority_off_published` meet their goals: the distances of
the baselines' medians from the published 985 s, 1.34 and 1.46.

The cases are the seeds. A full run also has a case for each model and number of GPUs of `iteration_models`: our ratios,
their range over all variations, and the published ratios; then our ratios under each variation. A variation changes one
assumption, or one value that the policies see.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

from benchmarks.clairvoyant.search import Found, clairvoyant_schedule
from benchmarks.direct import simulate
from benchmarks.iteration_models import (
    MODELS,
    PUBLISHED,
    SCENARIO,
    Model,
    contenders,
    policies,
    rivals,
    scenario_of,
    variations,
)
from benchmarks.report import Report, arguments, publish, spread
from services.scheduler.policy.static import StaticPolicy
from simulator.policies import Contender
from simulator.scenario import Scenario, load_scenario

SEEDS = range(10, 20)
PUBLISHED_S, PUBLISHED_DYNARL, PUBLISHED_PRIORITY = 985.0, 1.34, 1.46
VARIED_SEEDS = (10,)
STRONG = ("phases_ordered", "best_split", "planned_once")
"""Each has a figure of its own beside `tide`. A user would do one of the first two; the last is `tide`'s first plan."""
EVALUATIONS, QUICK_EVALUATIONS = 200, 18
"""The number of schedules that the clairvoyant search runs."""

GOALS = {
    "static_off_published": "<= 0.05",
    "dynarl_off_published": "<= 0.05",
    "dynarl_priority_off_published": "<= 0.05",
    "tide_vs_static": ">= 1.50",
    "tide_vs_phases_ordered": ">= 1.25",
    "tide_vs_best_split": ">= 1.10",
    "tide_vs_best_other": ">= 1.03",
    "tide_over_clairvoyant": "<= 1.08",
    "sim_s": "<= 5",
    "sim_1024_s": "<= 60",
    "sim_1024_gib": "<= 2",
}


def compared(among: Mapping[str, Contender], seed: int, *, directly: bool = False) -> dict[str, float]:
    """The seconds of the iteration under each policy and baseline, and the bound."""
    seconds: dict[str, float] = {}
    for name, each in among.items():
        run = simulate(each.scenario, each.policy, name=name, seed=seed, directly=directly)
        assert run.num_lost == 0, f"{name} lost {run.num_lost} samples at seed {seed}"
        seconds[name], seconds["bound"] = run.iteration_s, run.bound.bound_s
    return seconds


def ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    """The ratios of the result of `compared`."""
    others, tide_s = rivals(seconds), seconds["tide"]
    return {
        **{f"{name}_vs_static": seconds["static"] / each for name, each in others.items() if name != "static"},
        **{f"tide_vs_{name}": seconds[name] / tide_s for name in ("static", *STRONG)},
        "tide_vs_best_other": min(others.values()) / tide_s,
        "tide_over_bound": seconds["tide"] / seconds["bound"],
    }


def figures_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key in rows[0]:
        found = spread([row[key] for row in rows])
        figures |= {key: found["median"], f"{key}_min": found["min"], f"{key}_max": found["max"]}
    return figures


def distances(figures: Mapping[str, float], static_s: float) -> dict[str, float]:
    """The relative distances of the baselines' medians from the published numbers."""
    return {
        "static_off_published": abs(static_s / PUBLISHED_S - 1),
        "dynarl_off_published": abs(figures["dynarl_vs_static"] / PUBLISHED_DYNARL - 1),
        "dynarl_priority_off_published": abs(figures["dynarl_priority_vs_static"] / PUBLISHED_PRIORITY - 1),
    }


def clairvoyant(scenario: Scenario, seed: int, *, is_quick: bool = False) -> Found:
    """The best schedule. A full search begins also at the schedules of all policies but collocated phases, in which
    nothing overlaps."""
    if is_quick:
        return clairvoyant_schedule(scenario, seed=seed, evaluations=QUICK_EVALUATIONS)
    others = {name: policy for name, policy in policies(scenario).items() if name not in ("static", "tide")}
    others |= {"static split": StaticPolicy()}
    return clairvoyant_schedule(scenario, seed=seed, evaluations=EVALUATIONS, others=tuple(others.items()))


def costs_of_simulating(scenario: Scenario) -> dict[str, float]:
    """The cost of simulating: one published iteration under `tide`, the slowest policy, and the large iteration in a
    process of its own."""
    policy = policies(scenario)["tide"]
    began = time.perf_counter()
    simulate(scenario, policy, seed=SEEDS[0])
    took_s = time.perf_counter() - began
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.iteration_large"], capture_output=True, text=True, check=True
    )
    return {"sim_s": took_s, **json.loads(done.stdout)}


def beside_published(model: Model, num_gpus: int) -> list[dict[str, Any]]:
    """A row of our ratios, their range over all variations and the published ratios; then a row for each variation."""
    found = list(_varied(model, num_gpus))
    (_, base_row), *others = found
    published = PUBLISHED[model.name, num_gpus]
    base = published.verl or published.rlinf
    scenario = scenario_of(model, num_gpus)
    tokens = scenario.workload(VARIED_SEEDS[0]).lengths.num_tokens
    ours: dict[str, float] = {}
    for key in [key for key in base_row if "_vs_" in key]:
        low, high = min(row[key] for _, row in found), max(row[key] for _, row in found)
        ours |= {key: base_row[key], f"{key}_low": low, f"{key}_high": high}
    case = f"{model.name} on {num_gpus} GPUs"
    whole = {
        "case": case,
        "static_ktokens_per_s": tokens / base_row["static_s"] / 1000,
        **ours,
        "published_base": "verl" if published.verl else "rlinf",
        "published_base_ktokens_per_s": base,
        "published_rlinf_vs_base": published.rlinf / base,
        "published_rlhfuse_vs_base": published.rlhfuse / base,
        "published_dynarl_vs_base": published.dynarl / base,
    }
    by_variation = [
        {"case": f"{case}, {name}", **{key: value for key, value in row.items() if "_vs_" in key}}
        for name, row in others
    ]
    return [whole, *by_variation]


def _varied(model: Model, num_gpus: int) -> Iterator[tuple[str, dict[str, float]]]:
    """The name of each variation, and the ratios with it."""
    for each in variations():
        scenario = scenario_of(model, num_gpus, each.overrides)
        among = contenders(scenario, each.wrong)
        rows = [compared(among, seed, directly=True) for seed in VARIED_SEEDS]
        medians = {key: median(ratios(row)[key] for row in rows) for key in ratios(rows[0])}
        yield each.name, medians | {"static_s": median(row["static"] for row in rows)}


def main() -> int:
    options = arguments("Policies on the published iteration, simulated.")
    scenario = load_scenario(SCENARIO)
    among = contenders(scenario)
    seeds = SEEDS[:1] if options.quick else SEEDS
    models = () if options.quick else [(model, num_gpus) for model in MODELS for num_gpus in (64, 128)]
    cases: list[dict[str, Any]] = []
    with ProcessPoolExecutor() as pool:
        searched = {seed: pool.submit(clairvoyant, scenario, seed, is_quick=options.quick) for seed in seeds}
        seconds = {seed: pool.submit(compared, among, seed) for seed in seeds}
        beside = [pool.submit(beside_published, *each) for each in models]
    rows = {seed: each.result() for seed, each in seconds.items()}
    for seed, row in rows.items():
        found = searched[seed].result()
        row["clairvoyant"] = found.seconds
        where = {"clairvoyant_from": found.origin, "clairvoyant_found_by_evaluation": found.nth}
        cases.append({"case": f"seed {seed}", **_with_unit(row), **where})
    figures = figures_of(
        [ratios(row) | {"tide_over_clairvoyant": row["tide"] / row["clairvoyant"]} for row in rows.values()]
    )
    figures["static_s"] = median(row["static"] for row in rows.values())
    figures |= distances(figures, figures["static_s"]) | costs_of_simulating(scenario)
    cases += [row for each in beside for row in each.result()]
    report = Report(
        name="iteration_sim",
        figures=figures,
        goals=GOALS,
        cases=cases,
        against="the same lengths under the other policies, and what DynaRL and RLinf published",
    )
    return publish(report, options)


def _with_unit(row: Mapping[str, float]) -> dict[str, float]:
    return {f"{key}_s": value for key, value in row.items()}


if __name__ == "__main__":
    sys.exit(main())
