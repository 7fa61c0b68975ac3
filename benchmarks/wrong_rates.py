"""A policy that sees wrong rates or a wrong law of lengths. It shows the value of a choice on a wrong basis.

Only what a job is told is changed. The iteration itself follows the scenario, and so do its measurements:
- the trainer's rate in the layouts in which it has trained;
- the speed of decoding, once engines generate (`services/scheduler/state/learned.py`).

With all factors 1 the choices are those of the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy import Policy
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.costs import DecodeStep
from services.scheduler.state.values import JobSpec


@dataclass(frozen=True, slots=True)
class Wrong:
    """Factors of the true values: the trainer's rates, the rate of decoding, the median length, and both spreads of its
    logarithm. `are_hints_shuffled`: each prompt has the hint of another, which looks as good and tells nothing."""

    trainer: float = 1.0
    decode: float = 1.0
    median: float = 1.0
    sigma: float = 1.0
    are_hints_shuffled: bool = False

    def distorted(self, situation: Situation) -> Situation:
        spec, law, picture = situation.spec, situation.lengths, situation.generation
        trainer = tuple((size, rate * self.trainer) for size, rate in spec.rates.trainer)
        if self.are_hints_shuffled and picture.hints:
            others = np.random.default_rng(len(picture.hints)).permutation(len(picture.hints))
            picture = replace(picture, hints=tuple(picture.hints[other] for other in others))
        return replace(
            situation,
            generation=picture,
            spec=replace(spec, rates=replace(spec.rates, trainer=trainer)),
            costs=replace(situation.costs, decode=self._decoding(situation)),
            lengths=replace(
                law,
                log_mean=law.log_mean + math.log(self.median),
                sigma_prompt=law.sigma_prompt * self.sigma,
                sigma_group=law.sigma_group * self.sigma,
            ),
        )

    def _decoding(self, situation: Situation) -> DecodeStep:
        """The told step until engines generate: from then on the scheduler corrects it by what it measures."""
        is_measured = any(engine.num_running and engine.rate_tokens_per_s > 0 for engine in situation.engines)
        return situation.costs.decode if is_measured else situation.costs.decode.slowed(1 / self.decode)


@dataclass(frozen=True, slots=True)
class MisinformedPolicy:
    policy: Policy
    wrong: Wrong

    def check(self, spec: JobSpec) -> None:
        self.policy.check(spec)

    def choose(self, situation: Situation) -> Choice:
        return self.policy.choose(self.wrong.distorted(situation))
