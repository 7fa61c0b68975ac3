"""The time of one decision on one core: `python -m benchmarks.decide [--json] [--quick] [--save]`.

The cluster has 1,024 GPUs: 512 engines run 4,096 sequences, and as many wait. The benchmark takes the decisions of a
simulated iteration at moments at which nearly the largest number of sequences runs, spread evenly. A policy that keeps
GPUs from the rollout runs fewer sequences then. The timed part is a whole `turn` without events:
1. the situation is made;
2. the policy chooses;
3. the choice becomes commands;
4. the state records them.

The figures are those of `tide`; `decide_slowest_ms` is that of the slowest decision that moves GPUs, the opening among
them. The cases have every policy, with decisions that move GPUs apart, since they are few and take longest. `tide` has
one more without hints, where it makes the order of prompts anew from time to time. Each decision is taken `REPEATS`
times, and the median counts. DynaRL publishes under 200 ms for its planning.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from benchmarks.contenders import SCENARIO, cluster_of, policies
from benchmarks.iteration_grid import NO_HINTS
from benchmarks.report import Report, arguments, publish
from services.scheduler.decide.turn import turn
from services.scheduler.policy import Policy
from services.scheduler.state.cluster_state import ClusterState
from simulator.iteration import SimulatedIteration
from simulator.scenario import load_scenario
from simulator.scheduled import Scheduled

NUM_GPUS = 1024
RUNNING_AN_ENGINE = 8
NEARLY = 0.95
"""The share of the largest number of running sequences from which on a moment is timed."""
MOMENTS, QUICK_MOMENTS = 400, 60
REPEATS = 5
"""How often a decision is taken. Else one interruption would be the result: the slowest is of ten, p99 of four."""
SEED = 0
TIMED = "tide"
GOALS = {"decide_p50_ms": "<= 5", "decide_p99_ms": "<= 20", "decide_slowest_ms": "<= 50"}


Moment = tuple[ClusterState, int]


@dataclass
class Watch:
    """Collects states with the times of their decisions: those with nearly the most running sequences (`moments`), and
    those whose decision moved GPUs (`moves`)."""

    num_running: int = 0
    moments: list[Moment] = field(default_factory=list)
    moves: list[Moment] = field(default_factory=list)
    last: Moment | None = None

    def __call__(self, state: ClusterState, now_ms: int) -> None:
        if self.last is not None and self.last[0].remembered.assignment != state.remembered.assignment:
            self.moves.append(self.last)
        self.last = state, now_ms
        generation = state.seen.generation
        running = sum(engine.num_running for engine in generation.engines) if generation is not None else 0
        self.num_running = max(self.num_running, running)
        if running >= NEARLY * self.num_running and self._is_another(now_ms):
            self.moments.append((state, now_ms))

    def _is_another(self, now_ms: int) -> bool:
        """All decisions at one instant see the same iteration, so only the first one counts."""
        return not self.moments or now_ms > self.moments[-1][1]

    def spread(self, count: int) -> list[Moment]:
        found = self.moments
        return [found[at * len(found) // count] for at in range(count)] if len(found) > count else found


def timed(policy: Policy, moments: Sequence[Moment]) -> dict[str, float]:
    took = [median(each) for each in zip(*(milliseconds(policy, moments) for _ in range(REPEATS)), strict=True)]
    p99 = quantiles(took, n=100, method="inclusive")[98]
    return {"p50_ms": median(took), "p99_ms": p99, "max_ms": max(took), "moments": len(took)}


def milliseconds(policy: Policy, moments: Sequence[Moment]) -> list[float]:
    took = []
    for state, now_ms in moments:
        began = time.perf_counter()
        turn(state, now_ms, policy)
        took.append((time.perf_counter() - began) * 1000)
    return took


def main() -> int:
    options = arguments("The time of one decision.")
    overrides = [*cluster_of(NUM_GPUS), f"costs.engine.max_running={RUNNING_AN_ENGINE}"]
    hinted, unhinted = (load_scenario(SCENARIO, [*overrides, *more]) for more in ((), NO_HINTS))
    tried = [(name, hinted, policy) for name, policy in policies(hinted).items()]
    tried += [(f"{TIMED}, no hints", unhinted, policies(unhinted)[TIMED])]
    cases: list[dict[str, Any]] = []
    for name, scenario, policy in tried:
        watch = Watch()
        Scheduled(SimulatedIteration(scenario, SEED), policy, watch=watch).run(name)
        count = QUICK_MOMENTS if options.quick else MOMENTS
        cases.append({"case": name, "num_running": watch.num_running, **timed(policy, watch.spread(count))})
        cases.append({"case": f"{name}, moves", **timed(policy, watch.moves)})
        print(*cases[-2:], sep="\n")
    own, moves = (next(case for case in cases if case["case"] == name) for name in (TIMED, f"{TIMED}, moves"))
    report = Report(
        name="decide",
        figures={
            "decide_p50_ms": own["p50_ms"],
            "decide_p99_ms": own["p99_ms"],
            "decide_slowest_ms": moves["max_ms"],
        },
        goals=GOALS,
        cases=cases,
        against="under 200 ms, as DynaRL publishes",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
