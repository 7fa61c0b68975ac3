"""A policy that is told wrong rates or a wrong law of lengths: what a choice is worth when what it stands on is off.

Only what the policy is told is changed, in each situation; what the iteration takes is as the scenario says, and so is
what of it was measured: the trainer's rate in the layouts that it has trained in.
Invariant: told nothing wrong, it chooses as the policy does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from services.scheduler.policy import Policy
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.values import JobSpec


@dataclass(frozen=True, slots=True)
class Wrong:
    """Each as a factor of what is true: the trainer's rates, the rate of decoding, the median length and both spreads
    of its logarithm."""

    trainer: float = 1.0
    decode: float = 1.0
    median: float = 1.0
    sigma: float = 1.0

    def told(self, situation: Situation) -> Situation:
        spec, law = situation.spec, situation.lengths
        trainer = tuple((size, rate * self.trainer) for size, rate in spec.rates.trainer)
        return replace(
            situation,
            spec=replace(spec, rates=replace(spec.rates, trainer=trainer)),
            costs=replace(situation.costs, decode=situation.costs.decode.slowed(1 / self.decode)),
            lengths=replace(
                law,
                log_mean=law.log_mean + math.log(self.median),
                sigma_prompt=law.sigma_prompt * self.sigma,
                sigma_group=law.sigma_group * self.sigma,
            ),
        )


@dataclass(frozen=True, slots=True)
class Misled:
    policy: Policy
    wrong: Wrong

    def check(self, spec: JobSpec) -> None:
        self.policy.check(spec)

    def choose(self, situation: Situation) -> Choice:
        return self.policy.choose(self.wrong.told(situation))
