"""A training under `tide` and under fixed splits: `python -m benchmarks.training_sim [--json] [--quick] [--save]`.

The job has 200 iterations, in which the mean length goes from 1.5k to 10k tokens in a line. A ratio compares trainings
with the same lengths:

    tide_vs_start_split        = seconds of the split that is best for the first 10 iterations / seconds of tide
    tide_vs_hindsight_split    = seconds of the split that is best for the whole job           / seconds of tide
    tide_async_vs_async_split  = the first of these ratios, of asynchronous trainings
    tide_async_vs_async_hindsight_split  = the second
    tide_vs_async_split, tide_vs_async_hindsight_split   = of the asynchronous splits / of tide, strict
    following_vs_start_split, async_following_vs_async_split  = the same for the best split of each iteration by itself

The last two are of a few iterations, and changes cost nothing: so much lies in moving GPUs between iterations alone.

Strict: an iteration begins when the one before it has ended. `tide` starts from the first split. Asynchronous: the
rollout is one iteration ahead at most, and engines end their sequences under old weights. Here `tide` is its balance
between iterations, which starts from the first split too. It has the physics of the middle iteration throughout.

There are three settings:
- `roofline`, which has the goals: Qwen2.5-7B on 32 H100, times computed from model and GPU. It is half of
  `examples/scenarios/grpo_7b_64gpu.yaml`: half of its prompts on half of its GPUs, with its TP 4 and its spreads.
- `published_fit`, whose figures begin with this name: a quarter of the published job on 16 GPUs, on which the trainer
  has a quarter of its rate on 64 GPUs.
- `rough`, strict only, whose figures begin with this name: the first with filtered groups (a tenth, growing to four
  tenths), no hints in the first 50 iterations and durations that vary by a tenth. In `rough_losses_...` three nodes are
  lost too, and come back after five minutes.

The first was chosen before `tide` ran on it: one copy of the trainer has room on 4 GPUs, so that splits have steps of
an eighth, and a training takes some minutes. No rule of `tide` was tuned on any, nor on these seeds.

Splits are searched by simulation (`training_splits`), strict ones with the best order
of prompts. The search for the whole job sees iterations that are evenly spaced. Figures are medians over the seeds,
`_min` and `_max` their range. A case has the seconds by quarter of the job, and the moves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.contenders import SCENARIO, cluster_of
from benchmarks.iteration_grid import NOISE
from benchmarks.report import Report, arguments, publish, spread
from benchmarks.training_splits import WINDOW, StrictTraining, async_following
from services.scheduler.policy import Policy
from services.scheduler.policy.balance import Split as AsyncSplit
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.layouts import with_dp
from simulator.asynchrony.course import Asynchrony
from simulator.asynchrony.run import AsyncRun, simulate_async
from simulator.asynchrony.search import tuned_split
from simulator.best_split import Split
from simulator.cost_model import Costs
from simulator.gpus import Doing
from simulator.job_iterations import SimulatedJob
from simulator.job_run import simulate_job
from simulator.scenario import Scenario, load_scenario
from tidegate.types import PromptOrder

ITERATIONS, QUICK_ITERATIONS = 200, 20
FIRST = 10
"""The iterations for which the split of the start is tuned. A user tunes it in the first half an hour."""
NUM_SAMPLED = 10
"""Enough for the order of the splits: from one to the next the mean grows by a tenth of its whole way."""
STALENESS = 1
RATIOS = (
    "tide_vs_start_split",
    "tide_vs_hindsight_split",
    "following_vs_start_split",
    "tide_async_vs_async_split",
    "tide_async_vs_async_hindsight_split",
    "async_following_vs_async_split",
    "tide_vs_async_split",
    "tide_vs_async_hindsight_split",
    "losses_tide_vs_start_split",
)
GOALS = {
    "tide_vs_start_split": ">= 1.30",
    "tide_vs_hindsight_split": ">= 1.10",
    "tide_async_vs_async_split": ">= 1.10",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """`prefix`: of its figures. `file` and `overrides`: its scenario, without the drift."""

    name: str
    prefix: str
    file: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    is_rough: bool = False

    def scenario(self, num_iterations: int, *, has_losses: bool = False) -> Scenario:
        words = [*self.overrides, f"drift.mean_tokens={{0: 1500, {num_iterations}: 10000}}"]
        if self.is_rough:
            words += [f"drift.trained_share={{0: 0.9, {num_iterations}: 0.6}}"]
        if has_losses:
            lost = zip(LOST_NODES, (num_iterations * part // 8 for part in (1, 4, 7)), strict=True)
            rows = (f"{{kind: node, node: {node}, iteration: {at}, at_s: 30, back_after_s: 300}}" for node, at in lost)
            words += [f"faults=[{', '.join(rows)}]"]
        return load_scenario(SCENARIO.with_name(self.file), words)


ROOFLINE = Setting(
    name="roofline",
    prefix="",
    file="grpo_7b_64gpu.yaml",
    overrides=(*cluster_of(32), "algorithm.prompts_per_iteration=256"),
    seeds=(500, 501, 502),
)
_FEW = 16
PUBLISHED_FIT = Setting(
    name="published_fit",
    prefix="published_fit_",
    file=SCENARIO.name,
    overrides=(
        *cluster_of(_FEW, 2),
        "algorithm.prompts_per_iteration=128",
        f"costs.trainer.rate_gpus={_FEW}",
        f"costs.trainer.rate_tokens_per_s={Costs().trainer.rate_tokens_per_s * _FEW / Costs().trainer.rate_gpus}",
    ),
    seeds=(500,),
)
ROUGH = Setting(
    name="rough",
    prefix="rough_",
    file=ROOFLINE.file,
    overrides=(*ROOFLINE.overrides, *NOISE, f"drift.epoch_prompts={50 * 256}"),
    seeds=(500,),
    is_rough=True,
)
LOST_NODES = ("n3", "n2", "n1")
"""One that has GPUs of the trainer takes its state along: the iteration begins again. `n0` has the services' leads."""
SETTINGS = (ROOFLINE, PUBLISHED_FIT, ROUGH)


def strict_case(scenario: Scenario, num_iterations: int, seed: int) -> dict[str, Any]:
    training = StrictTraining(scenario, num_iterations, seed)
    start = training.best(range(num_first(num_iterations)))
    some = sampled(num_iterations)
    hindsight = training.best(some)
    rows = simulate_job(training.job(start), TidePolicy(), name="tide").rows
    assert not any(row.num_lost for row in rows), f"tide lost samples at seed {seed}"
    seconds = {
        "tide": [row.seconds for row in rows],
        "start_split": [training.seconds(start, number) for number in range(num_iterations)],
        "hindsight_split": [training.seconds(hindsight, number) for number in range(num_iterations)],
    }
    return {
        "start_split": split_text(scenario, start),
        "hindsight_split": split_text(scenario, hindsight),
        **case_of(seconds),
        "following_vs_start_split": training.sum_s(start, some) / training.following_s(start, some),
        "tide_moves_quarters": quarters([row.num_moves for row in rows]),
    }


def lossy_case(setting: Setting, num_iterations: int, start: str, seed: int) -> dict[str, Any]:
    """The same training with lost nodes, under `tide` and in the split `start`."""
    scenario = setting.scenario(num_iterations, has_losses=True)
    split = split_of(start, scenario)
    job = StrictTraining(scenario, num_iterations, seed).job(split)
    policies: dict[str, Policy] = {"tide": TidePolicy(), "start_split": StaticPolicy(split.order)}
    rows = {name: simulate_job(job, policy, name=name).rows for name, policy in policies.items()}
    assert not any(row.num_lost for each in rows.values() for row in each), f"samples were lost at seed {seed}"
    seconds = {name: sum(row.seconds for row in each) for name, each in rows.items()}
    return {
        **{f"losses_{name}_s": total for name, total in seconds.items()},
        "losses_tide_vs_start_split": seconds["start_split"] / seconds["tide"],
        "losses_num_restarts": {name: sum(row.num_restarts for row in each) for name, each in rows.items()},
    }


def async_case(scenario: Scenario, num_iterations: int, seed: int) -> dict[str, Any]:
    job, rules = SimulatedJob(scenario, num_iterations, seed), Asynchrony(staleness=STALENESS)
    lengths = [job.iteration(number).workload.lengths for number in range(num_iterations)]
    own = job.iteration(num_iterations // 2).scenario
    start = tuned_split(own, rules, lengths[: max(2, num_first(num_iterations))])
    some = sampled(num_iterations)
    # All that is sampled is steady.
    tuning = [lengths[0], *(lengths[number] for number in some), lengths[-1]]
    hindsight = tuned_split(own, rules, tuning, near=start)
    windows = [max(0, min(number, num_iterations - WINDOW)) for number in some]
    fixed_s, following_s = async_following(own, rules, lengths, start, windows)
    runs = {
        "tide_async": simulate_async(own, rules, lengths, split=start, balances=True),
        "async_split": simulate_async(own, rules, lengths, split=start),
        "async_hindsight_split": simulate_async(own, rules, lengths, split=hindsight),
    }
    return {
        "async_split": str(start),
        "async_hindsight_split": str(hindsight),
        **case_of({name: run.iteration_s for name, run in runs.items()}),
        "async_following_vs_async_split": fixed_s / following_s,
        "tide_async_splits": split_changes(runs["tide_async"]),
        **{f"{name}_waiting_share": waiting_share(run) for name, run in runs.items()},
    }


def waiting_share(run: AsyncRun) -> float:
    """The share of the GPUs' time in which they wait for work: no move of GPUs within iterations gains more."""
    spans = [span for each in run.timeline.values() for span in each]
    waiting_s = sum(span.end_s - span.start_s for span in spans if span.state is Doing.WAITING)
    return waiting_s / sum(span.end_s - span.start_s for span in spans)


def case_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The sums of the trainings, those of their quarters, and the ratios to the first one, which is `tide`'s."""
    totals = {name: sum(each) for name, each in seconds.items()}
    tide, *others = totals
    return {
        **{f"{name}_s": total for name, total in totals.items()},
        **{f"{name}_quarters_s": quarters(each) for name, each in seconds.items()},
        **{f"{tide}_vs_{name}": totals[name] / totals[tide] for name in others},
    }


def strict_vs(strict: Mapping[str, Any], ahead: Mapping[str, Any]) -> dict[str, float]:
    """The strict `tide` over the asynchronous splits."""
    names = ("async_split", "async_hindsight_split")
    return {f"tide_vs_{name}": ahead[f"{name}_s"] / strict["tide_s"] for name in names}


def num_first(num_iterations: int) -> int:
    return max(1, min(FIRST, num_iterations // 4))


def sampled(num_iterations: int) -> range:
    every = max(WINDOW, num_iterations // NUM_SAMPLED)
    return range(every // 2, num_iterations, every)


def quarters(values: Sequence[float]) -> list[float]:
    ends = [round(len(values) * part / 4) for part in range(5)]
    return [round(sum(values[begin:end]), 1) for begin, end in pairwise(ends)]


def split_of(text: str, scenario: Scenario) -> Split:
    """The inverse of `split_text`."""
    sizes, order = text.split()
    actor, _, inference = map(int, sizes.split("/"))
    home = scenario.placement().layout
    assert home is not None, "a training has a trainer"
    layout = with_dp(home, actor * home.dp // home.num_ranks)
    assert layout is not None, f"{text} is a split that was found"
    return Split(layout, inference, PromptOrder(order))


def split_text(scenario: Scenario, split: Split) -> str:
    num_rollout = len(scenario.cluster.gpus()) - split.actor.num_ranks - split.num_inference
    return f"{split.actor.num_ranks}/{num_rollout}/{split.num_inference} {split.order}"


def split_changes(run: AsyncRun) -> list[str]:
    """The splits, each with the iteration in which it began."""

    def text(at_s: float, split: AsyncSplit) -> str:
        ended, at = 0.0, 0
        while at < len(run.iteration_s) and ended + run.iteration_s[at] <= at_s:
            ended, at = ended + run.iteration_s[at], at + 1
        return f"{at}: {split}"

    return [text(*each) for each in run.splits]


def figures_of(cases: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key in (key for key in RATIOS if key in cases[0]):
        found = spread([case[key] for case in cases])
        name = prefix + key
        figures |= {name: found["median"], f"{name}_min": found["min"], f"{name}_max": found["max"]}
    return figures


def case_under(setting: Setting, num_iterations: int, seed: int) -> dict[str, Any]:
    """All trainings of a setting under one seed. Only strict ones may lose nodes or filter groups."""
    scenario = setting.scenario(num_iterations)
    strict = {"case": f"{setting.name}, seed {seed}", "setting": setting.name}
    strict |= strict_case(scenario, num_iterations, seed)
    if setting.is_rough:
        return strict | lossy_case(setting, num_iterations, strict["start_split"], seed)
    ahead = async_case(scenario, num_iterations, seed)
    return strict | ahead | strict_vs(strict, ahead)


def main() -> int:
    options = arguments("A whole training with growing lengths, simulated.")
    num_iterations = QUICK_ITERATIONS if options.quick else ITERATIONS
    wanted = [(setting, seed) for setting in SETTINGS for seed in setting.seeds[: 1 if options.quick else None]]
    with ProcessPoolExecutor() as pool:
        futures = [pool.submit(case_under, setting, num_iterations, seed) for setting, seed in wanted]
    cases = [each.result() for each in futures]
    figures: dict[str, float] = {}
    for setting in SETTINGS:
        figures |= figures_of([case for case in cases if case["setting"] == setting.name], setting.prefix)
    report = Report(
        name="training_sim",
        figures=figures,
        goals=GOALS,
        cases=cases,
        against="fixed splits of the same GPUs, searched by the simulator, on the same lengths",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
