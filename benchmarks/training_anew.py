"""`tide` as it is now, on the saved strict trainings: `python -m benchmarks.training_anew [--json] [--save]`.

`training_sim` takes an hour of a core, mostly for the search of splits. This runs `tide` alone and takes the splits
from the saved result. The first quarter of the start's split runs too, and where it takes other seconds the benchmark
stops. Asynchronous trainings have another policy, and are not run.

Beside `tide_vs_start_split` stands `best_schedule_vs_start_split`, of a search that knows the lengths
(`clairvoyant/search.py`). It is of the middle iteration of each quarter of the first training, as sums over the four,
and `tide_there_vs_start_split` is `tide` on these iterations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.clairvoyant.search import clairvoyant_schedule
from benchmarks.direct import simulate
from benchmarks.report import RESULTS, Report, arguments, publish, spread
from benchmarks.tide_anew import SavedIsOld
from benchmarks.training_sim import GOALS, ITERATIONS, SETTINGS, Setting, quarters, split_of
from benchmarks.training_splits import StrictTraining
from services.scheduler.policy.tide.tide_policy import TidePolicy
from simulator.best_split import static_seconds
from simulator.iteration import SimulatedIteration
from simulator.job_run import simulate_job

OTHERS = ("start_split", "hindsight_split", "async_split", "async_hindsight_split")
MIDDLES = tuple(ITERATIONS * part // 8 for part in (1, 3, 5, 7))
EVALUATIONS = 60


def case_of(setting: Setting, saved: Mapping[str, Any]) -> dict[str, Any]:
    """SavedIsOld."""
    scenario, seed = setting.scenario(ITERATIONS), int(saved["case"].rpartition(" ")[2])
    training, start = StrictTraining(scenario, ITERATIONS, seed), split_of(saved["start_split"], scenario)
    first_s = round(training.sum_s(start, range(ITERATIONS // 4)), 1)
    if first_s != saved["start_split_quarters_s"][0]:
        raise SavedIsOld(
            f"the start's split takes {first_s} s in the first quarter of {saved['case']}, and saved are "
            f"{saved['start_split_quarters_s'][0]}: run python -m benchmarks.training_sim --save"
        )
    rows = simulate_job(training.job(start), TidePolicy(), name="tide").rows
    assert not any(row.num_lost for row in rows), f"tide lost samples at seed {seed}"
    seconds = [row.seconds for row in rows]
    return {
        "case": saved["case"],
        "setting": setting.name,
        "tide_s": sum(seconds),
        "was_tide_s": saved["tide_s"],
        "tide_quarters_s": quarters(seconds),
        **{f"tide_vs_{name}": saved[f"{name}_s"] / sum(seconds) for name in OTHERS if f"{name}_s" in saved},
    }


def searched(setting: Setting, saved: Mapping[str, Any], number: int) -> dict[str, float]:
    """The seconds of an iteration with the training's lengths of that number, in the start's split, under `tide` and
    in the best schedule that is found."""
    scenario, seed = setting.scenario(ITERATIONS), int(saved["case"].rpartition(" ")[2])
    start = split_of(saved["start_split"], scenario)
    own = StrictTraining(scenario, ITERATIONS, seed).job(start).iteration(number).scenario
    tide_s = simulate(own, TidePolicy(), seed=seed, directly=True).iteration_s
    best = clairvoyant_schedule(own, seed=seed, evaluations=EVALUATIONS)
    start_s = static_seconds(SimulatedIteration(own, seed), start.order)
    return {"start_split": start_s, "tide": tide_s, "best_schedule": min(best.seconds, tide_s)}


def main() -> int:
    options = arguments("tide as it is now, in trainings beside the saved seconds of fixed splits.")
    saved = json.loads((RESULTS / "training_sim.json").read_text())
    wanted = [(setting, case) for setting in SETTINGS for case in saved["cases"] if case["setting"] == setting.name]
    middles = MIDDLES[-1:] if options.quick else MIDDLES
    with ProcessPoolExecutor() as pool:
        few = [pool.submit(searched, *wanted[0], number) for number in middles]
        cases = list(pool.map(case_of, *zip(*wanted[: 1 if options.quick else None], strict=True)))
        rows = [each.result() for each in few]
    sums = {name: sum(row[name] for row in rows) for name in rows[0]}
    figures = {
        "best_schedule_vs_start_split": sums["start_split"] / sums["best_schedule"],
        "tide_there_vs_start_split": sums["start_split"] / sums["tide"],
    }
    for setting in SETTINGS:
        own = [case for case in cases if case["setting"] == setting.name]
        for key in (f"tide_vs_{name}" for name in OTHERS if own and f"tide_vs_{name}" in own[0]):
            found, name = spread([case[key] for case in own]), setting.prefix + key
            figures |= {name: found["median"], f"{name}_min": found["min"], f"{name}_max": found["max"]}
            if name in saved["figures"]:
                figures |= {f"was_{name}": saved["figures"][name]}
    report = Report(
        name="training_anew",
        figures=figures,
        goals={key: goal for key, goal in GOALS.items() if key in figures},
        cases=[*cases, *({"case": f"iteration {at}", **row} for at, row in zip(middles, rows, strict=True))],
        against=f"the fixed splits of training_sim at {saved['commit']}, on the same lengths",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
