"""Methods that change the rollout itself, beside `tide`: `python -m benchmarks.early_ends [--json] [--quick] [--save]`.

Tail batching, partial rollouts and dropped ones change what an iteration trains (`simulator/rounds.py`). So all are
compared by

    rate = trained tokens / seconds      over `ITERATIONS` iterations on the same lengths' law

relative to collocated phases on the same prompts. The settings are the cells of `iteration_grid`, the published
iteration, also with a decode step by batch, and two near those of RollPacker and APRIL as far as we know them. Policies
run one iteration for each of `ITERATIONS` seeds; their rate is relative to phases on these. `probed` is Seer's order in
phases (`simulator/probing.py`). Methods and `probed` run without the cells' noise, as their phases do.

    tide_vs_X = rate of tide / rate of X      the median over the settings; `_min`, `_max`: the range

A case also has the share of tokens that were thrown away, of trained tokens that older weights made, and the mean
length of a trained response, relative to the law's. `seer_X` is the rollout alone, by the way in which responses are
shared, relative to groups that stay on one engine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.contenders import SCENARIO
from benchmarks.direct import simulate
from benchmarks.iteration_grid import CELLS
from benchmarks.report import Report, arguments, publish, spread
from simulator.generation import after_rollout_s
from simulator.policies import BY_RATE, policies_of
from simulator.probing import WAYS
from simulator.rounds import METHODS, tally_of
from simulator.scenario import Scenario, load_scenario

ITERATIONS, QUICK_ITERATIONS = 5, 2
"""Five are four short rounds and the long one of tail batching."""
SEED = 40
STEP_BY_BATCH = (
    "costs.engine.step_floor_s=0",
    "costs.engine.step_base_s=0.006",
    "costs.engine.step_per_sequence_s=6e-5",
)
SETTINGS: Mapping[str, Sequence[str]] = {
    "the published iteration": (),
    "the published iteration, decode step by batch": STEP_BY_BATCH,
    "16 GPUs, 64 prompts, at most 8k tokens, long tails": (
        "cluster.nodes={n0: 8, n1: 8}",
        "cluster.placement={actor: 0-3, rollout: 4-13, inference: 14-15}",
        "actor_layout.dp=1",
        "algorithm.prompts_per_iteration=64",
        "lengths.median_tokens=550",
        "lengths.sigma_prompt=0.8",
        "lengths.sigma_group=0.6",
        "lengths.max_tokens=8192",
        *STEP_BY_BATCH,
    ),
    "8 GPUs, 32 prompts, at most 16k tokens": (
        "cluster.nodes={n0: 8}",
        "cluster.placement={actor: 0-3, rollout: 4-5, inference: 6-7}",
        "actor_layout.dp=1",
        "algorithm.prompts_per_iteration=32",
        "algorithm.group_size=8",
        "lengths.median_tokens=8000",
        "lengths.sigma_prompt=0.45",
        "lengths.sigma_group=0.3",
        "lengths.max_tokens=16384",
        *STEP_BY_BATCH,
    ),
}
GOALS = {"tide_vs_tail_batching": ">= 1.05", "tide_vs_probed": ">= 1.05"}


def main() -> int:
    options = arguments("Methods that end a rollout early, beside tide, simulated.")
    num = QUICK_ITERATIONS if options.quick else ITERATIONS
    cells = CELLS[:1] if options.quick else CELLS
    settings = [(name, SEED) for name in SETTINGS] + [(cell.name, cell.seeds[0]) for cell in cells]
    with ProcessPoolExecutor() as pool:
        futures = [pool.submit(case_of, name, num, seed) for name, seed in settings]
    cases = [each.result() for each in futures]
    figures: dict[str, float] = {}
    for method in BY_RATE:
        over = spread([case["tide"] / case[method] for case in cases])
        key = f"tide_vs_{method}"
        figures |= {key: over["median"], f"{key}_min": over["min"], f"{key}_max": over["max"]}
    report = Report(
        name="early_ends",
        figures=figures,
        goals=GOALS,
        cases=cases,
        against="collocated phases on the same prompts",
    )
    return publish(report, options)


def scenario_of(name: str) -> Scenario:
    """The scenario of a setting or cell."""
    if name in SETTINGS:
        return load_scenario(SCENARIO, SETTINGS[name])
    return next(cell.scenario() for cell in CELLS if cell.name == name)


def case_of(name: str, num_iterations: int, seed: int) -> dict[str, Any]:
    """The row of one setting."""
    scenario = scenario_of(name)
    tallies = {method: tally_of(method, scenario, num_iterations=num_iterations, seed=seed) for method in METHODS}
    phases = tallies.pop("phases")
    row: dict[str, Any] = {"case": name, "phases_tokens_per_s": phases.rate_tokens_per_s}
    for method, tally in tallies.items():
        mean = tally.trained_tokens / tally.num_responses
        row |= {
            method: tally.rate_tokens_per_s / phases.rate_tokens_per_s,
            f"{method}_wasted_share": tally.wasted_share,
            f"{method}_old_share": tally.old_tokens / tally.trained_tokens,
            f"{method}_mean_length": mean / (phases.trained_tokens / phases.num_responses),
        }
    lengths = scenario.read_lengths(seed)
    rollouts_s = {way: rollout_s(scenario, lengths) for way, rollout_s in WAYS.items()}
    ways = {f"seer_{way}": rollouts_s["pinned"] / seconds for way, seconds in rollouts_s.items() if way != "pinned"}
    rest_s = after_rollout_s(scenario, lengths)
    probed = (rollouts_s["divided"] + rest_s) / (rollouts_s["probed"] + rest_s)
    return row | _policies(scenario, num_iterations, seed) | ways | {"probed": probed}


def _policies(scenario: Scenario, num_iterations: int, seed: int) -> dict[str, float]:
    """The rates of policies that train every prompt in its iteration."""
    seconds = {
        name: sum(simulate(scenario, policy, seed=seed + at, directly=True).iteration_s for at in range(num_iterations))
        for name, policy in policies_of(("phases", "fused_ordered", "planned_once", "tide"), scenario).items()
    }
    phases_s = seconds.pop("phases")
    return {name: phases_s / each for name, each in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
