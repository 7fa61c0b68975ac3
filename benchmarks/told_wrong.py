"""`tide` where the world is not as it was told: `python -m benchmarks.told_wrong [--json] [--quick] [--save]`.

All policies are told the same wrong values (`WRONGS`); the iteration and its measurements stay true. On each seed:

    told_wrong  = seconds of tide as told / seconds of tide told right      to be low
    tide_vs_X   = seconds of X as told / seconds of tide as told            above 1: `tide` is faster

A case is one wrong telling under one law of physics: the computed one, and the one fitted to the published iteration.
`worst_told_wrong` and `worst_vs_X` are the worst case's median over the seeds. The other figures are medians over the
cases, with `_min` and `_max` the range over cases and seeds. Nothing was chosen on the seeds.

`tide` compares spreads and medians by factors of two, which are those of `WRONGS`. So the cases of `BETWEEN` have other
factors, and figures of their own: those that begin with `between_`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contenders import ROOFLINE, SCENARIO
from benchmarks.direct import simulate
from benchmarks.report import Report, arguments, publish, spread
from benchmarks.wrong_rates import MisinformedPolicy, Wrong
from simulator.policies import policies_of
from simulator.scenario import Scenario, load_scenario

SEEDS = range(460, 465)
OTHERS = ("dynarl", "phases_ordered")
LAWS: Mapping[str, Path] = {"roofline": ROOFLINE, "published_fit": SCENARIO}
WRONGS: Mapping[str, Wrong] = {
    "spreads x0.5": Wrong(sigma=0.5),
    "spreads x2": Wrong(sigma=2.0),
    "hints of other prompts": Wrong(are_hints_shuffled=True),
    "median x0.5": Wrong(median=0.5),
    "median x2": Wrong(median=2.0),
    "trainer x0.7": Wrong(trainer=0.7),
    "trainer x1.3": Wrong(trainer=1.3),
    "decoding x0.7": Wrong(decode=0.7),
    "decoding x1.3": Wrong(decode=1.3),
    "spreads x0.5, hints of other prompts, trainer x1.3": Wrong(sigma=0.5, are_hints_shuffled=True, trainer=1.3),
    "spreads x2, median x0.5, decoding x0.7": Wrong(sigma=2.0, median=0.5, decode=0.7),
    "median x2, trainer x0.7, decoding x1.3": Wrong(median=2.0, trainer=0.7, decode=1.3),
}
BETWEEN: Mapping[str, Wrong] = {
    "spreads x0.7": Wrong(sigma=0.7),
    "spreads x1.5": Wrong(sigma=1.5),
    "median x0.7": Wrong(median=0.7),
    "median x1.5": Wrong(median=1.5),
    "spreads x0.7, hints of other prompts, trainer x1.15": Wrong(sigma=0.7, are_hints_shuffled=True, trainer=1.15),
    "spreads x1.5, median x0.7, decoding x0.85": Wrong(sigma=1.5, median=0.7, decode=0.85),
}
GOALS = {"worst_told_wrong": "<= 1.06", "worst_vs_dynarl": ">= 1.0"}


def seconds_of(scenario: Scenario, seed: int, wrongs: Mapping[str, Wrong] = WRONGS) -> dict[str, dict[str, float]]:
    """By wrong telling: the seconds of `tide`, of the others, and of `tide` told right (`told_right`)."""
    among = policies_of(("tide", *OTHERS), scenario)
    right_s = simulate(scenario, among["tide"], seed=seed, directly=True).iteration_s
    found = {}
    for name, wrong in wrongs.items():
        told = {key: MisinformedPolicy(policy, wrong) for key, policy in among.items()}
        row = {key: simulate(scenario, policy, seed=seed, directly=True).iteration_s for key, policy in told.items()}
        found[name] = row | {"told_right": right_s}
    return found


def case_of(name: str, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A case has each ratio by seed, and the medians of the seconds. `rows`: by seed."""
    return {
        "case": name,
        **{f"{key}_s": median(row[key] for row in rows) for key in rows[0]},
        "told_wrong": [row["tide"] / row["told_right"] for row in rows],
        **{f"tide_vs_{other}": [row[other] / row["tide"] for row in rows] for other in OTHERS},
    }


def figures_of(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    figures = {"worst_told_wrong": max(median(case["told_wrong"]) for case in cases)}
    figures |= {f"worst_vs_{other}": min(median(case[f"tide_vs_{other}"]) for case in cases) for other in OTHERS}
    for key in ("told_wrong", *(f"tide_vs_{other}" for other in OTHERS)):
        found = spread([value for case in cases for value in case[key]])
        figures |= {key: median(median(case[key]) for case in cases)}
        figures |= {f"{key}_min": found["min"], f"{key}_max": found["max"]}
    return figures


def main() -> int:
    options = arguments("tide where the world is not as told, simulated.")
    laws = dict(list(LAWS.items())[:1]) if options.quick else LAWS
    wrongs = WRONGS if options.quick else {**WRONGS, **BETWEEN}
    seeds = SEEDS[:1] if options.quick else SEEDS
    with ProcessPoolExecutor() as pool:
        futures = {
            law: [pool.submit(seconds_of, load_scenario(path), seed, wrongs) for seed in seeds]
            for law, path in laws.items()
        }
    cases: dict[str, list[dict[str, Any]]] = {"": [], "between_": []}
    for law, each in futures.items():
        by_seed = [future.result() for future in each]
        for name in wrongs:
            case = case_of(f"{law}: {name}", [rows[name] for rows in by_seed])
            cases["" if name in WRONGS else "between_"].append(case)
    figures = {prefix + key: value for prefix, own in cases.items() if own for key, value in figures_of(own).items()}
    report = Report(
        name="told_wrong",
        figures=figures,
        goals=GOALS,
        cases=[case for own in cases.values() for case in own],
        against="tide told right, and other policies told the same, on the same lengths",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
