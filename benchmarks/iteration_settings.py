"""Policies on changed iterations: `python -m benchmarks.iteration_settings [--json] [--quick] [--save]`.

`SETTINGS` has changes of the published iteration, one at a time: an assumption, the cluster, or the amount of work. The
policies know rates and lengths, and no constant of theirs was chosen on these seeds. A case has the median seconds of
each policy over the seeds, and the best policy besides `tide`:

    tide_vs_best_other = min(seconds of the other policies) / seconds of tide

with its median and range over the seeds. The figures are the median and the smallest of the settings. `static_split`
keeps the placement, and `rlinf_wait` has RLinf's wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

from benchmarks.direct import simulate
from benchmarks.iteration_models import SCENARIO, cluster_of, policies
from benchmarks.report import Report, arguments, publish, spread
from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from services.scheduler.policy.static import StaticPolicy
from simulator.scenario import Scenario, load_scenario

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
        futures = {name: [pool.submit(seconds_of, name, seed) for seed in seeds] for name in SETTINGS}
    cases = [case_of(name, [each.result() for each in runs]) for name, runs in futures.items()]
    found = spread([case["tide_vs_best_other"] for case in cases])
    report = Report(
        name="iteration_settings",
        figures={"tide_vs_best_other": found["median"], "tide_vs_best_other_worst": found["min"]},
        goals=GOALS,
        cases=cases,
        against="the other policies on the same lengths and costs",
    )
    return publish(report, options)


def seconds_of(name: str, seed: int) -> dict[str, float]:
    """The seconds of the iteration under each policy."""
    scenario = load_scenario(SCENARIO, SETTINGS[name])
    seconds: dict[str, float] = {}
    for policy_name, policy in _all_policies(scenario):
        run = simulate(scenario, policy, name=policy_name, seed=seed, directly=True)
        assert run.num_lost == 0, f"{policy_name} lost {run.num_lost} samples at seed {seed} of {name}"
        seconds[policy_name] = run.iteration_s
    return seconds


def case_of(name: str, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The case of one setting. `rows` has the result of `seconds_of` for each seed."""
    medians = {policy: median(row[policy] for row in rows) for policy in rows[0]}
    others = [policy for policy in medians if policy != "tide"]
    over = spread([min(row[policy] for policy in others) / row["tide"] for row in rows])
    return {
        "case": name,
        **{f"{policy}_s": seconds for policy, seconds in medians.items()},
        "best_other": min(others, key=medians.__getitem__),
        "tide_vs_best_other": over["median"],
        "tide_vs_best_other_min": over["min"],
        "tide_vs_best_other_max": over["max"],
    }


def _all_policies(scenario: Scenario) -> Iterator[tuple[str, Policy]]:
    yield from policies(scenario).items()
    yield "static_split", StaticPolicy()
    section = scenario.scheduler
    waits = section.rlinf.model_copy(update={"use_wait_before_last_iter_policy": True})
    yield "rlinf_wait", policy_of(section.model_copy(update={"policy": "rlinf", "rlinf": waits}))


if __name__ == "__main__":
    sys.exit(main())
