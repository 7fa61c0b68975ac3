"""One simulated iteration under a policy, and what came of it.

The iteration begins where the policy first places it: components wake up for it while the weights are taken, and that
time is in the cost of the sync, the same for all. From then on the scheduler folds what the components tell, asks the
policy, and commands what its choice needs (`scheduled`).
Invariant: the same scenario, policy and seed give the same run.
"""

from __future__ import annotations

from services.scheduler.policy import Policy
from simulator.iteration import Simulated
from simulator.outcome import Decided, GpuSpan, Run
from simulator.scenario import Scenario
from simulator.scheduled import Scheduled

__all__ = ["Decided", "GpuSpan", "Run", "simulate"]


def simulate(scenario: Scenario, policy: Policy, *, name: str = "", seed: int | None = None) -> Run:
    """ScenarioError for a placement without a home for each component, ValueError for a job that the policy cannot run,
    Unfinished where the policy leaves work without GPUs for ever, or the scheduler gives the job up."""
    simulated = Simulated(scenario, scenario.seed if seed is None else seed)
    policy.check(simulated.spec)
    return Scheduled(simulated, policy).run(name or type(policy).__name__)
