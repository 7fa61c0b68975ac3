"""What `tide` is worth where it has been weak: `python -m benchmarks.tide_parts [--json] [--quick] [--save]`.

A setting is an iteration, of which the policies are told right (`told_wrong` has the others). On each seed `tide` is
compared with what a user could do instead, on the same lengths:

    tide_vs_X = seconds of X / seconds of tide          above 1: `tide` is faster

The seeds of `TUNING` serve to choose rules, those of `REPORTED` to report. `--quick` runs the first of `TUNING` without
`best_split`, whose search takes longer than everything else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.contenders import ROOFLINE, SCENARIO
from benchmarks.direct import simulate
from benchmarks.iteration_settings import short
from benchmarks.report import Report, arguments, publish, spread
from simulator.policies import contenders_of
from simulator.scenario import Scenario, load_scenario

TUNING, REPORTED = range(100, 105), range(200, 205)
OTHERS = ("phases_ordered", "best_split", "planned_once", "dynarl")
LONG_SEARCH = "best_split"
GOALS = {"worst_vs_dynarl": ">= 1.0", "worst_vs_best_split": ">= 0.99"}


@dataclass(frozen=True, slots=True)
class Setting:
    overrides: Sequence[str] = ()
    is_computed: bool = False

    def scenario(self) -> Scenario:
        return load_scenario(ROOFLINE if self.is_computed else SCENARIO, self.overrides)


EIGHT = (*short(8, 32, 900, tp=2), "cluster.placement={actor: 0-1, rollout: 2-5, inference: 6-7}")
SETTINGS: Mapping[str, Setting] = {
    "published, 64 GPUs": Setting(),
    "roofline, 64 H100": Setting(is_computed=True),
    "roofline, a fixed order": Setting(("algorithm.minibatch_order=fixed",), is_computed=True),
    "complete minibatches": Setting(("algorithm.streams=false",)),
    "64 GPUs, 64 prompts of 300 tokens": Setting(short(64, 64, 300)),
    "16 GPUs, 64 prompts of 2,000 tokens": Setting(short(16, 64, 2000)),
    "8 GPUs, 32 prompts of 900 tokens": Setting(EIGHT),
}


def seconds_of(setting: Setting, seeds: Sequence[int], others: Sequence[str] = OTHERS) -> list[dict[str, float]]:
    """By seed: the seconds of `tide` and of the others."""
    among = contenders_of(("tide", *others), setting.scenario())
    return [
        {
            name: simulate(each.scenario, each.policy, seed=seed, directly=True).iteration_s
            for name, each in among.items()
        }
        for seed in seeds
    ]


def case_of(name: str, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    case: dict[str, Any] = {"case": name, "tide_s": median(row["tide"] for row in rows)}
    for other in rows[0]:
        if other != "tide":
            ratios = spread([row[other] / row["tide"] for row in rows])
            case |= {f"tide_vs_{other}": ratios["median"], f"tide_vs_{other}_min": ratios["min"]}
    return case


def main() -> int:
    options = arguments("tide where it has been weak, simulated.")
    seeds = TUNING[:1] if options.quick else REPORTED
    others = [name for name in OTHERS if not options.quick or name != LONG_SEARCH]
    cases = []
    for name, setting in SETTINGS.items():
        cases.append(case_of(name, seconds_of(setting, seeds, others)))
        print("  ".join(f"{key}={value:.3f}" if key != "case" else value for key, value in cases[-1].items()))
    figures = {f"worst_vs_{other}": min(case[f"tide_vs_{other}"] for case in cases) for other in others}
    goals = {key: goal for key, goal in GOALS.items() if key in figures}
    report = Report("tide_parts", figures, goals, cases, against="the other policies on the same lengths and costs")
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
