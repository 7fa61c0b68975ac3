"""How long a decision takes, on one core: `python -m benchmarks.decide [--json] [--quick] [--save]`.

1,024 GPUs, 512 engines that run 4,096 sequences together while as many wait. The moments are those at which a simulated
iteration asks the policy while all engines are full, spread over them evenly; a policy that keeps GPUs from the rollout
then runs fewer. At each the choice is timed once, with nothing cached from another.
The figures are `tide`'s; the cases have every policy's. DynaRL publishes under 200 ms for its planning.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from benchmarks.iteration_models import SCENARIO, cluster_of, policies
from benchmarks.report import Report, arguments, publish
from services.scheduler.policy import Policy
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.values import JobSpec
from simulator.run import simulate
from simulator.scenario import Scenario, load_scenario

NUM_GPUS = 1024
RUNNING_AN_ENGINE = 8
MOMENTS, QUICK_MOMENTS = 400, 60
TIMED = "tide"


@dataclass
class Recorder:
    """A policy, with every situation that it was asked in."""

    policy: Policy
    situations: list[Situation] = field(default_factory=list)

    def check(self, spec: JobSpec) -> None:
        self.policy.check(spec)

    def choose(self, situation: Situation) -> Choice:
        self.situations.append(situation)
        return self.policy.choose(situation)


def moments(scenario: Scenario, policy: Policy, count: int) -> list[Situation]:
    recorder = Recorder(policy)
    simulate(scenario, recorder)
    most = max(map(num_running, recorder.situations))
    found = [situation for situation in recorder.situations if num_running(situation) == most]
    return [found[at * len(found) // count] for at in range(min(count, len(found)))]


def num_running(situation: Situation) -> int:
    return sum(engine.num_running for engine in situation.engines)


def milliseconds(policy: Policy, situations: Sequence[Situation]) -> list[float]:
    took = []
    for situation in situations:
        # What is computed once of a picture is computed here: a decision comes with a new one.
        fresh = replace(situation, generation=replace(situation.generation))
        began = time.perf_counter()
        policy.choose(fresh)
        took.append((time.perf_counter() - began) * 1000)
    return took


def main() -> int:
    options = arguments("How long a decision takes.")
    overrides = [*cluster_of(NUM_GPUS), f"costs.engine.max_running={RUNNING_AN_ENGINE}"]
    scenario = load_scenario(SCENARIO, overrides)
    cases: list[dict[str, Any]] = []
    for name, policy in policies(scenario).items():
        situations = moments(scenario, policy, QUICK_MOMENTS if options.quick else MOMENTS)
        took = milliseconds(policy, situations)
        p99 = quantiles(took, n=100, method="inclusive")[98]
        figures = {"p50_ms": median(took), "p99_ms": p99, "max_ms": max(took), "moments": len(took)}
        cases.append({"case": name, "num_running": num_running(situations[0]), **figures})
        print(cases[-1])
    (timed,) = [case for case in cases if case["case"] == TIMED]
    report = Report(
        name="decide",
        figures={"decide_p50_ms": timed["p50_ms"], "decide_p99_ms": timed["p99_ms"]},
        goals={"decide_p50_ms": "<= 5", "decide_p99_ms": "<= 20"},
        cases=cases,
        against="under 200 ms, as DynaRL publishes",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
