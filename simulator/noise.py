"""Random factors of durations: engines that differ, steps that vary, portions that take longer or shorter.

    factor = exp(sigma * z)

z is a standard normal number of its own for each seed, kind and place, so the order of the draws changes none of them.

Invariants:
- Without a spread every factor is 1. [test_noise: without_a_spread]
- A seed gives the same factors. [test_noise: a_seed_gives_the_same_factors]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from simulator.assumptions import Source
from tidegate.config.base import NonNegativeFloat, Section

_ENGINE, _STEP, _PORTION = range(3)


class NoiseSection(Section):
    """Spreads of the logarithm of durations. 0: the durations are exact."""

    engine_sigma: Annotated[NonNegativeFloat, Source("A: of engines; each keeps its factor for the iteration")] = 0.0
    step_sigma: Annotated[NonNegativeFloat, Source("A: of the decode steps between two changes of a batch")] = 0.0
    portion_sigma: Annotated[NonNegativeFloat, Source("A: of the trainer's portions")] = 0.0


@dataclass(frozen=True, slots=True)
class Noise:
    section: NoiseSection
    seed: int = 0

    def of_engine(self, engine: int, batch: int) -> float:
        """The factor of an engine's steps. `batch`: the number of its changes before."""
        own = self.section
        return self._factor(own.engine_sigma, _ENGINE, engine) * self._factor(own.step_sigma, _STEP, engine, batch)

    def of_portion(self, number: int) -> float:
        """The factor of a portion of the trainer, by its number in the iteration."""
        return self._factor(self.section.portion_sigma, _PORTION, number)

    def _factor(self, sigma: float, *place: int) -> float:
        if not sigma:
            return 1.0
        return math.exp(sigma * np.random.default_rng([self.seed, *place]).standard_normal())


EXACT = Noise(NoiseSection())
"""No noise."""
