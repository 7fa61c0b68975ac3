"""A training under `tide` and under fixed splits: `python -m benchmarks.training_sim [--json] [--quick] [--save]`.

The job has 200 iterations, in which the mean length goes from 1.5k to 10k tokens. It is a quarter of the published one:
a quarter of its prompts on 16 GPUs, on which the trainer has a quarter of its rate on 64 GPUs. Strict: an iteration
begins when the one before it has ended. A ratio compares jobs with the same lengths:

    tide_vs_start_split      = seconds of the split that is best for the first 5 iterations / seconds of tide
    tide_vs_hindsight_split  = seconds of the split that is best for the whole job          / seconds of tide

`tide` starts from the first of these splits. Figures are medians over the seeds, `_min` and `_max` their range. A case
has the seconds by quarter of the job.

The splits are searched: some numbers of copies of the trainer and sizes of the inference, and the rollout has the rest.
A fixed split learns nothing, so its iterations are simulated one by one. The search for the whole job sees ten of them,
evenly spaced, and the best split then runs all. A full run takes some ten minutes on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.contenders import SCENARIO, cluster_of
from benchmarks.direct import Direct
from benchmarks.report import Report, arguments, publish, spread
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.tide_policy import TidePolicy
from simulator.cost_model import Costs
from simulator.job_iterations import SimulatedJob
from simulator.job_run import simulate_job
from simulator.scenario import load_scenario

NUM_GPUS, TP = 16, 2
SEEDS, QUICK_SEEDS = range(40, 42), range(40, 41)
ITERATIONS, QUICK_ITERATIONS = 200, 20
FIRST = 5
"""The iterations for which the split of the start is tuned. A user tunes it in the first hour."""
NUM_SAMPLED = 10
"""Enough for the order of the splits: from one to the next the mean grows by a tenth of its whole way."""
COPIES, INFERENCE_GPUS = range(1, 6), (2, 4)
PROMPTS = 128
RATE_TOKENS_PER_S = Costs().trainer.rate_tokens_per_s * NUM_GPUS / Costs().trainer.rate_gpus
GOALS = {"tide_vs_start_split": ">= 1.30", "tide_vs_hindsight_split": ">= 1.10"}


@dataclass(frozen=True, slots=True, order=True)
class FixedSplit:
    """Copies of the trainer, GPUs of the inference; the rollout has the rest."""

    num_copies: int
    num_inference_gpus: int

    @property
    def name(self) -> str:
        actor = self.num_copies * TP
        return f"{actor}/{NUM_GPUS - actor - self.num_inference_gpus}/{self.num_inference_gpus}"

    def overrides(self) -> Iterator[str]:
        actor, inference = self.num_copies * TP, NUM_GPUS - self.num_inference_gpus
        placement = f"actor: 0-{actor - 1}, rollout: {actor}-{inference - 1}, inference: {inference}-{NUM_GPUS - 1}"
        yield from (f"cluster.placement={{{placement}}}", f"actor_layout.dp={self.num_copies}")


SPLITS = tuple(FixedSplit(copies, inference) for copies in COPIES for inference in INFERENCE_GPUS)


class Training:
    """One job under one seed. Its lengths do not depend on the split that it starts from."""

    def __init__(self, seed: int, num_iterations: int) -> None:
        self._seed, self._num_iterations = seed, num_iterations
        self._jobs = {split: self.job(split) for split in SPLITS}
        self.split_s = cache(self._split_s)

    def job(self, split: FixedSplit) -> SimulatedJob:
        overrides = [
            *cluster_of(NUM_GPUS, TP),
            *split.overrides(),
            f"algorithm.prompts_per_iteration={PROMPTS}",
            f"costs.trainer.rate_gpus={NUM_GPUS}",
            f"costs.trainer.rate_tokens_per_s={RATE_TOKENS_PER_S}",
            f"drift.mean_tokens={{0: 1500, {self._num_iterations}: 10000}}",
        ]
        return SimulatedJob(load_scenario(SCENARIO, overrides), self._num_iterations, self._seed)

    def best(self, iterations: Iterable[int]) -> FixedSplit:
        """The split with the fewest seconds of these iterations together."""
        numbers = tuple(iterations)
        return min(SPLITS, key=lambda split: (sum(self.split_s(split, each) for each in numbers), split))

    def whole_s(self, split: FixedSplit) -> list[float]:
        """The seconds of each iteration."""
        return [self.split_s(split, number) for number in range(self._num_iterations)]

    def _split_s(self, split: FixedSplit, number: int) -> float:
        return Direct(self._jobs[split].iteration(number), StaticPolicy()).run(split.name).iteration_s


def case_of(seed: int, num_iterations: int) -> dict[str, Any]:
    training = Training(seed, num_iterations)
    every = num_iterations // NUM_SAMPLED
    start, hindsight = training.best(range(FIRST)), training.best(range(every // 2, num_iterations, every))
    rows = simulate_job(training.job(start), TidePolicy(), name="tide").rows
    assert not any(row.num_lost for row in rows), f"tide lost samples at seed {seed}"
    seconds = {
        "tide": [row.seconds for row in rows],
        "start_split": training.whole_s(start),
        "hindsight_split": training.whole_s(hindsight),
    }
    totals = {name: sum(each) for name, each in seconds.items()}
    return {
        "case": f"seed {seed}",
        "start_split": start.name,
        "hindsight_split": hindsight.name,
        **{f"{name}_s": total for name, total in totals.items()},
        **{f"{name}_quarters_s": _quarters(each) for name, each in seconds.items()},
        "tide_vs_start_split": totals["start_split"] / totals["tide"],
        "tide_vs_hindsight_split": totals["hindsight_split"] / totals["tide"],
        "tide_moves": sum(row.num_moves for row in rows),
    }


def figures_of(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key in GOALS:
        found = spread([case[key] for case in cases])
        figures |= {key: found["median"], f"{key}_min": found["min"], f"{key}_max": found["max"]}
    return figures


def main() -> int:
    options = arguments("A whole training with growing lengths, simulated.")
    num_iterations = QUICK_ITERATIONS if options.quick else ITERATIONS
    cases = [case_of(seed, num_iterations) for seed in (QUICK_SEEDS if options.quick else SEEDS)]
    report = Report(
        name="training_sim",
        figures=figures_of(cases),
        goals=GOALS,
        cases=cases,
        against="fixed splits of the same GPUs, searched by the simulator, on the same lengths",
    )
    return publish(report, options)


def _quarters(seconds: Sequence[float]) -> list[float]:
    size = len(seconds) // 4
    return [round(sum(seconds[at : at + size]), 1) for at in range(0, 4 * size, size)]


if __name__ == "__main__":
    sys.exit(main())
