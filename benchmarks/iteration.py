"""Policies on real iterations, on modelled slots: `python -m benchmarks.iteration [--json] [--quick] [--save]`.

The job is `examples/paced.yaml` with `CHANGES`: the same seed, lengths and slots for each policy, one after the other
on this machine. Lengths are drawn (lognormal), so a policy changes no length. The order is `arrival`, and minibatches
stream. Two splits of the slots have no moves: the configured one, which nobody has tuned, and the best one that
`tidegate plan` finds. The other policies start from the configured split.

    X_over_Y       = seconds of all iterations under X / under Y
    forecast       seconds of the same iterations, simulated with the pace's law and the true lengths
    clairvoyant    the best schedule of a search that knows the lengths, simulated as well

A run is void where the slots did not keep their pace. Its figures stand here, and `void_runs` counts it. The figures
with `fixed_` are of the same job in fixed order.

`--quick`: one iteration, in arrival order alone, and no search.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clairvoyant.search import clairvoyant_schedule
from benchmarks.report import Report, arguments, publish
from services.scheduler.policy.registry import policy_of
from simulator.job_scenario import PredictionBasis, basis_of_config, scenario_of
from simulator.planning.starts import best_start, placed_only
from simulator.run import simulate
from simulator.scenario import Scenario, parse_scenario
from tidegate.config.files import Sources, load_sources
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder, load_job
from tidegate.launcher.outcome import End, Outcome
from tidegate.length_law import drawn_length
from tidegate.types import SampleId

PACED = Path(__file__).resolve().parent.parent / "examples" / "paced.yaml"
CHANGES = (
    "cluster.pace.time_scale=0.1",
    "algorithm.prompts_per_iteration=32",
    "actor.max_tokens_per_microbatch=256",
    "scheduler.decide_every_s=0.25",
    "scheduler.tide.least_gain_s=0.3",
)
GOALS = {"tide_over_static": "<= 0.75", "tide_over_best_static": "<= 0.92", "tide_over_rlinf": "<= 0.95"}
SEARCHED = 200
"""The schedules of a clairvoyant search for each iteration."""


@dataclass(frozen=True, slots=True)
class Case:
    """A policy, and the split that it starts from. `words` are the changes that make it."""

    name: str
    policy: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    case: str
    seconds: tuple[float, ...]
    forecast_s: tuple[float, ...]
    wall_s: float
    moves: Mapping[str, Any]
    late_share: float
    is_void: bool

    def row(self, order: str) -> dict[str, Any]:
        return {
            "case": self.case,
            "order": order,
            "iterations_s": sum(self.seconds),
            "seconds": list(self.seconds),
            "forecast_s": sum(self.forecast_s),
            "forecast_error": sum(self.seconds) / sum(self.forecast_s) - 1,
            "wall_s": self.wall_s,
            **self.moves,
            "late_share": self.late_share,
            "is_void": self.is_void,
        }


def config_of(words: Sequence[str]) -> JobConfig:
    return load_sources(Sources([PACED], overrides=[*CHANGES, *words])).config


def cases_of(config: JobConfig) -> tuple[Case, ...]:
    """The untuned split, the best fixed one as `tidegate plan` finds it, and the policies that move slots."""
    _, start = best_start(config, placed_only(scenario_of(config, basis_of(config))))
    best = start.config
    place, layout = best.cluster.component_placement, best.actor.layout
    split = (
        f"cluster.component_placement={{actor: '{place.actor}', rollout: '{place.rollout}', "
        f"inference: '{place.inference}'}}",
        f"actor.layout.dp={layout.dp}",
        f"inference.layout.dp={best.inference.layout.dp}",
        f"scheduler.static.order={best.scheduler.static.order}",
    )
    moving = [Case(name, name) for name in ("rlinf", "dynarl", "tide")]
    return (Case("static", "static"), Case("best_static", "static", split), *moving)


def measured(case: Case, words: Sequence[str], folder: Path) -> Measured:
    """Run the job to its end. RuntimeError where it does not finish, or loses or doubles a sample."""
    changes = [*words, *case.words, f"scheduler.policy={case.policy}"]
    config = config_of([*changes, f"output_dir={folder}"])
    command = [sys.executable, "-m", "cli", "run", str(PACED), *CHANGES, *changes, "--output-dir", str(folder)]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    summary = json.loads(done.stdout.splitlines()[-1])
    outcome = Outcome.read(JobFolder.of(config).result)
    if outcome.end is not End.FINISHED or summary["lost"] or summary["duplicates"]:
        raise RuntimeError(f"{case.name}: {outcome.end}, {summary['lost']} lost, {summary['duplicates']} doubled")
    assert outcome.pace is not None
    return Measured(
        case=case.name,
        seconds=tuple(outcome.seconds[number] for number in sorted(outcome.seconds)),
        forecast_s=tuple(forecast_s(config, number, folder) for number in range(config.algorithm.iterations)),
        wall_s=outcome.wall_s,
        moves={key: summary[key] for key in ("moves", "switch_s", "switch_s_median")},
        late_share=outcome.pace.late_share,
        is_void=outcome.pace.is_void,
    )


def forecast_s(config: JobConfig, iteration: int, folder: Path) -> float:
    scenario = true_scenario(config, iteration, folder)
    return simulate(scenario, policy_of(config.scheduler), name=config.scheduler.policy).iteration_s


def clairvoyant_s(words: Sequence[str], folder: Path) -> float:
    """The seconds of all iterations under the best found schedules."""
    config = config_of([*words, "scheduler.policy=tide"])
    scenarios = [true_scenario(config, number, folder) for number in range(config.algorithm.iterations)]
    return sum(clairvoyant_schedule(each, evaluations=SEARCHED).seconds for each in scenarios)


def true_scenario(config: JobConfig, iteration: int, folder: Path) -> Scenario:
    """The iteration with the costs of the pace's law, the default costs of switches, and the job's lengths and prompts.

    `folder` gets the file of the lengths, which a simulation reads.
    """
    raw = scenario_of(config, basis_of(config)).model_dump(mode="json")
    raw["lengths"] |= {"law": "trace", "file": str(true_lengths(config, iteration, folder))}
    return parse_scenario(raw)


def basis_of(config: JobConfig) -> PredictionBasis:
    """That of `tidegate plan`. The pace's reshards take their time, so no model is planned."""
    job = load_job(config)
    return basis_of_config(config, None, prompt_tokens=job.prompt_tokens, token_cost=job.token_cost)


def true_lengths(config: JobConfig, iteration: int, folder: Path) -> Path:
    """A file in `folder` with the lengths that the iteration has in the job, a line for each group."""
    law, own = config.rollout.length_law, config.algorithm
    assert law is not None
    # Prompts are counted over the whole job.
    first = iteration * own.prompts_per_iteration
    (file := folder / f"lengths-{iteration}.txt").write_text(
        "".join(
            " ".join(
                str(drawn_length(law, SampleId(1, iteration, prompt, draw), max_new_tokens=own.max_new_tokens))
                for draw in range(own.group_size)
            )
            + "\n"
            for prompt in range(first, first + own.prompts_per_iteration)
        )
    )
    return file


def ratios(runs: Mapping[str, Measured], *, prefix: str = "") -> dict[str, float]:
    """`tide` over each other policy, on the same iterations."""
    tide = sum(runs["tide"].seconds)
    return {f"{prefix}tide_over_{name}": tide / sum(each.seconds) for name, each in runs.items() if name != "tide"}


def main() -> int:
    options = arguments("Policies on real iterations, on modelled slots.")
    orders = ("arrival",) if options.quick else ("arrival", "fixed")
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    num_void = 0
    for order in orders:
        words = (f"algorithm.minibatch_order={order}", *(("algorithm.iterations=1",) if options.quick else ()))
        runs: dict[str, Measured] = {}
        for case in cases_of(config_of(words)):
            with tempfile.TemporaryDirectory(prefix="iteration-") as folder:
                runs[case.name] = measured(case, words, Path(folder))
            row = runs[case.name].row(order)
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
            rows.append(row)
        num_void += sum(each.is_void for each in runs.values())
        prefix = "" if order == "arrival" else f"{order}_"
        figures |= ratios(runs, prefix=prefix)
        if not options.quick:
            with tempfile.TemporaryDirectory(prefix="iteration-") as folder:
                best_s = clairvoyant_s(words, Path(folder))
            figures[f"{prefix}forecast_tide_over_clairvoyant"] = sum(runs["tide"].forecast_s) / best_s
            figures[f"{prefix}clairvoyant_over_forecast_static"] = best_s / sum(runs["static"].forecast_s)
    figures["void_runs"] = num_void
    report = Report(
        name="iteration",
        figures=figures,
        goals=GOALS | {"void_runs": "<= 0"},
        cases=rows,
        against="the same job, seed, lengths and modelled slots under the other policies",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
