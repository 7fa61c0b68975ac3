"""What probes are worth to `tide` without hints: `python -m benchmarks.probes [--json] [--quick] [--save]`.

On each seed `tide` runs with and without the order by probes (`tide/prompt_order.py`), on the same lengths and costs:

    gain = seconds without probes / seconds with them - 1          above 0: probes make iterations shorter

`gain` is the median over the settings' medians, `gain_min` and `gain_max` the least and the largest of these. The share
of the prompts that go whole was chosen on the seeds of `TUNING`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ablation_parts import PARTS, Part
from benchmarks.contenders import ROOFLINE, SCENARIO
from benchmarks.direct import simulate
from benchmarks.early_ends import SETTINGS as EARLY_ENDS
from benchmarks.iteration_grid import (
    DEAR_MOVES,
    LONG_TAILS,
    NO_HINTS,
    NOISE,
    SLOW_TRAINER,
    SMALL_CACHE,
    WIDE_GROUPS,
)
from benchmarks.report import Report, arguments, publish, spread
from services.scheduler.policy.tide.foresight import TideRules
from simulator.scenario import load_scenario

TUNING, REPORTED = range(80, 86), range(490, 495)
SETTINGS: Mapping[str, tuple[Path, Sequence[str]]] = {
    "base": (ROOFLINE, ()),
    "the published iteration": (SCENARIO, ()),
    "wide groups": (ROOFLINE, WIDE_GROUPS),
    "long tails": (ROOFLINE, LONG_TAILS),
    "small cache": (ROOFLINE, SMALL_CACHE),
    "hard to plan": (ROOFLINE, (*SLOW_TRAINER, *DEAR_MOVES, *WIDE_GROUPS, *NOISE)),
    **{name: (SCENARIO, words) for name, words in EARLY_ENDS.items() if "GPUs" in name},
}
GOALS = {"gain": ">= 0.005"}


def seconds_of(setting: str, seed: int, *, has_probes: bool) -> float:
    file, words = SETTINGS[setting]
    scenario = load_scenario(file, [*words, *NO_HINTS])
    part = Part() if has_probes else PARTS["an order by probes"]
    with part.left_out():
        policy = part.policy(TideRules(**scenario.scheduler.tide.model_dump()))
        return simulate(scenario, policy, seed=seed, directly=True).iteration_s


def main() -> int:
    options = arguments("What probes are worth to tide without hints, simulated.")
    seeds = TUNING[:1] if options.quick else REPORTED
    with ProcessPoolExecutor() as pool:
        found = {
            (name, seed, has_probes): pool.submit(seconds_of, name, seed, has_probes=has_probes)
            for name in SETTINGS
            for seed in seeds
            for has_probes in (False, True)
        }
    cases: list[dict[str, Any]] = []
    for name in SETTINGS:
        without_s, with_s = ([found[name, seed, each].result() for seed in seeds] for each in (False, True))
        gains = [before / after - 1 for before, after in zip(without_s, with_s, strict=True)]
        cases.append({"case": name, "tide_s": median(with_s), "gain": median(gains), "by_seed": gains})
    figures = spread([case["gain"] for case in cases])
    report = Report(
        name="probes",
        figures={"gain": figures["median"], "gain_min": figures["min"], "gain_max": figures["max"]},
        goals=GOALS,
        cases=cases,
        against="tide without probes, on the same lengths and costs",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
