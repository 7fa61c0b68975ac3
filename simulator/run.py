"""One simulated iteration under a policy, and its result.

The iteration begins with the policy's first assignment. Components wake up while they take the weights; the cost of the
sync includes this time, which is the same for all policies. From then on the scheduler folds the events of the
components, asks the policy, and issues the commands that the policy's choice needs (`scheduled`).

Invariant: the same scenario, policy and seed give the same run. [test_run: the_same_seed_gives_the_same_run]
"""

from __future__ import annotations

from services.scheduler.policy import Policy
from simulator.iteration import SimulatedIteration
from simulator.outcome import GpuSpan, PolicyDecision, Run
from simulator.scenario import Scenario
from simulator.scheduled import Scheduled

__all__ = ["PolicyDecision", "GpuSpan", "Run", "simulate"]


def simulate(scenario: Scenario, policy: Policy, *, name: str = "", seed: int | None = None) -> Run:
    """Simulate one iteration.

    ScenarioError: a component has no GPUs in the placement. ValueError: the policy cannot run the job. Unfinished: the
    policy leaves work without GPUs forever, or the scheduler fails the job.
    """
    simulated = SimulatedIteration(scenario, scenario.seed if seed is None else seed)
    policy.check(simulated.spec)
    return Scheduled(simulated, policy).run(name or type(policy).__name__)
