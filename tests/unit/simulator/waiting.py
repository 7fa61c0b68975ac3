"""A `tide` that waits with the last minibatch, because it sees wrong rates and times.

Before the last minibatch it sees a trainer that is very fast, and moves that take no time. Before the others it sees a
slow trainer, so that it has GPUs to lend. Only the policy's view is changed: the simulation uses the scenario's costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.policy.tide.foresight import TideRules, num_to_come
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.values import JobSpec

SLOW, FAST = 0.1, 1000.0
"""Factors of the trainer's measured rate."""


@dataclass(frozen=True, slots=True)
class Waiting:
    own: TidePolicy = field(default_factory=lambda: TidePolicy(TideRules(least_gain_s=0.0, least_payback=0.0)))

    def check(self, spec: JobSpec) -> None:
        self.own.check(spec)

    def choose(self, situation: Situation) -> Choice:
        trainer, costs = situation.trainer, situation.costs
        factor = SLOW
        if num_to_come(situation) <= 1:
            factor = FAST
            costs = replace(costs, release_s=0.0, load_s=0.0, reshard_s=0.0, inference_start_s=0.0)
        rates = tuple(
            replace(each, rate_tokens_per_s=each.rate_tokens_per_s * factor) for each in trainer.training.measured
        )
        wrong = replace(trainer, training=replace(trainer.training, measured=rates))
        return self.own.choose(replace(situation, costs=costs, trainer=wrong))
