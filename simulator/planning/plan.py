"""`tidegate plan`: every answer for one job, in one value.

1. The best fixed split of the job's GPUs.
2. Each policy from the configured placement and from that split.
3. What `tide` gains over that split, in several cases of physics.
4. What a rollout that runs ahead would gain.
5. What it takes.

Invariant: the same config and basis give the same plan. [test_plan: the_same_config_gives_the_same_plan]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.best_split import BestSplit
from simulator.job_scenario import PredictionBasis, scenario_of
from simulator.planning.ahead import Ahead, compared_ahead
from simulator.planning.gains import Gains, Mapped, gains_over
from simulator.planning.predictions import Prediction, predictions
from simulator.planning.starts import AS_CONFIGURED, Start, best_start, placed_only
from tidegate.config.job_config import ConfigError, JobConfig


@dataclass(frozen=True, slots=True)
class JobPlan:
    found: tuple[Prediction, ...]
    split: BestSplit
    best: Start
    gains: Gains
    ahead: Ahead


def plan_of(
    config: JobConfig,
    known: PredictionBasis,
    *,
    staleness: int,
    mapped: Mapped = map,
    told: Callable[[str], None] = lambda step: None,
) -> JobPlan:
    """`mapped`: as `map`, perhaps in other processes. `told`: is called with the name of each step that begins.

    ScenarioError: the simulator refuses the job. ConfigError: the iteration does not end under `static`.
    """
    scenario = placed_only(scenario_of(config, known))
    told("the best fixed split")
    split, best = best_start(config, scenario)
    configured = Start(AS_CONFIGURED, config)
    told("each policy from both placements")
    found = predictions((configured,) if best.config == config else (configured, best), known, mapped)
    if found[0].run is None:
        raise ConfigError(f"the iteration cannot be predicted: {found[0].refused}")
    told("tide in each case of physics")
    gains = gains_over(split, scenario, mapped)
    told("rollouts that run ahead")
    return JobPlan(found, split, best, gains, compared_ahead(split, scenario, staleness, mapped))
