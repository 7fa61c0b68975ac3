"""Policies on changed iterations: `python -m benchmarks.iteration_settings [--json] [--quick] [--save]`.

`SETTINGS` has changes of the published iteration, one at a time: an assumption, the cluster, or the amount of work. The
policies know rates and lengths, and no constant of theirs was chosen on these seeds. A case has the median seconds of
each policy over the seeds, and the best policy besides `tide`:

    tide_vs_best_other = min(seconds of the other policies) / seconds of tide

with its median and range over the seeds. The figures are the median and the smallest of the settings. The baselines are
those of `simulator/baselines.py`. `best_split` is searched for each setting, on seeds of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

from benchmarks.contenders import COMPARED, SCENARIO, STRONG, cluster_of, compared, contenders, rivals
from benchmarks.report import Report, arguments, publish, spread
from simulator.scenario import load_scenario

SEEDS = range(30, 35)
QUICK_SEEDS = range(30, 31)
GOALS = {"tide_vs_best_other": ">= 1.03", "tide_vs_best_other_worst": ">= 0.98"}


def short(num_gpus: int, prompts: int, median_tokens: int, *, tp: int = 4) -> tuple[str, ...]:
    """An iteration with less work."""
    sizes = (f"algorithm.prompts_per_iteration={prompts}", f"lengths.median_tokens={median_tokens}")
    return (*cluster_of(num_gpus, tp), *sizes)


SETTINGS: Mapping[str, Sequence[str]] = {
    "the published iteration": (),
    "8 minibatches of 4 s fixed": ("algorithm.n_minibatches=8", "costs.trainer.fixed_s=4"),
    "2 minibatches": ("algorithm.n_minibatches=2",),
    "long-tailed lengths": ("lengths.law=long_tailed",),
    "hints that tell little": ("lengths.hint_sigma=0.6",),
    "minibatches in a fixed order": ("algorithm.minibatch_order=fixed",),
    "minibatches that begin complete": ("algorithm.streams=false",),
    "3 turns a response": ("lengths.mean_turns=3", "lengths.environment_s=1", "lengths.observation_tokens=200"),
    "half as fast a trainer": ("costs.trainer.rate_tokens_per_s=91000",),
    "a trainer that scales nearly linearly": ("costs.trainer.exponent=0.9",),
    "128 GPUs": tuple(cluster_of(128)),
    "32 GPUs": tuple(cluster_of(32)),
    "64 GPUs, 128 prompts of 2,000 tokens": short(64, 128, 2000),
    "64 GPUs, 64 prompts of 300 tokens": short(64, 64, 300),
    "32 GPUs, 64 prompts of 900 tokens": short(32, 64, 900),
    "16 GPUs, 64 prompts of 2,000 tokens": short(16, 64, 2000),
    "16 GPUs, 32 prompts of 500 tokens": short(16, 32, 500),
    "8 GPUs, trainer TP 2, 32 prompts of 900 tokens": (
        *short(8, 32, 900, tp=2),
        "cluster.placement={actor: 0-1, rollout: 2-5, inference: 6-7}",
    ),
}


def main() -> int:
    options = arguments("Policies on changed iterations, simulated.")
    seeds = QUICK_SEEDS if options.quick else SEEDS
    with ProcessPoolExecutor() as pool:
        futures = {name: pool.submit(seconds_of, name, tuple(seeds)) for name in SETTINGS}
    cases = [case_of(name, each.result()) for name, each in futures.items()]
    found = spread([case["tide_vs_best_other"] for case in cases])
    strong = {f"tide_vs_{name}": median(case[f"tide_vs_{name}"] for case in cases) for name in STRONG}
    report = Report(
        name="iteration_settings",
        figures={"tide_vs_best_other": found["median"], "tide_vs_best_other_worst": found["min"], **strong},
        goals=GOALS,
        cases=cases,
        against="the other policies on the same lengths and costs",
    )
    return publish(report, options)


def seconds_of(name: str, seeds: Sequence[int]) -> list[dict[str, float]]:
    """By seed: the seconds of the iteration under each policy and baseline."""
    among = contenders(load_scenario(SCENARIO, SETTINGS[name]))
    return [compared(among, seed, directly=True) for seed in seeds]


def case_of(name: str, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The case of one setting. `rows` is the result of `seconds_of`."""
    medians = {policy: median(row[policy] for row in rows) for policy in COMPARED}
    others = list(rivals(medians))
    over = spread([min(row[policy] for policy in others) / row["tide"] for row in rows])
    return {
        "case": name,
        **{f"{policy}_s": seconds for policy, seconds in medians.items()},
        "best_other": min(others, key=medians.__getitem__),
        "tide_vs_best_other": over["median"],
        "tide_vs_best_other_min": over["min"],
        "tide_vs_best_other_max": over["max"],
        **{f"tide_vs_{name}": median(row[name] / row["tide"] for row in rows) for name in STRONG},
    }


if __name__ == "__main__":
    sys.exit(main())
