"""Forecasts of a job's iteration under each policy, from each start.

Invariant: the first forecast is `static` as configured. [test_plan: relative_to_static_as_configured]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.policy import Policy
from services.scheduler.policy.registry import policy_of
from simulator.iteration import SimulatedIteration
from simulator.job_scenario import PredictionBasis, scenario_of
from simulator.planning.gains import Mapped
from simulator.planning.starts import Start
from simulator.run import Run, simulate
from simulator.scenario import Scenario
from simulator.world import Unfinished
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.scheduler import POLICIES


@dataclass(frozen=True, slots=True)
class Prediction:
    """The forecast of one policy. `run` is None if the policy cannot run the job; `refused` then has the reason."""

    start: Start
    policy: str
    run: Run | None
    refused: str = ""

    @property
    def iteration_s(self) -> float:
        """The time of the iteration. It is infinite without a run."""
        return self.run.iteration_s if self.run else float("inf")


def predictions(starts: Sequence[Start], known: PredictionBasis, mapped: Mapped = map) -> tuple[Prediction, ...]:
    """The forecasts by start, then by policy. `mapped`: as `map`, perhaps in other processes.

    ScenarioError: the simulator refuses the job from a start.
    """
    scenarios = [scenario_of(start.config, known) for start in starts]
    wanted = [(start, name, scenario) for start, scenario in zip(starts, scenarios, strict=True) for name in POLICIES]
    return tuple(mapped(_predicted, *zip(*wanted, strict=True)))


def _predicted(start: Start, name: str, scenario: Scenario) -> Prediction:
    policy = _named(name, start.config)
    try:
        policy.check(SimulatedIteration(scenario, scenario.seed).spec)
        return Prediction(start, name, simulate(scenario, policy, name=name))
    except (ValueError, Unfinished) as error:
        # Report the reason in the row of this placement and policy, and go on with the others.
        return Prediction(start, name, None, str(error))


def _named(name: str, config: JobConfig) -> Policy:
    return policy_of(config.scheduler.model_copy(update={"policy": name}))
