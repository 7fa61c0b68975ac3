"""The learning rate as a pure function of progress, for every decay style of Megatron's scheduler.

Progress and all lengths are exact (ints and Fractions) and counted in steps. Only the resulting rate is a float.

Invariants:
- At any progress the rate has the same bits as that of `megatron.core.optimizer_param_scheduler` at as many
  `num_steps`, for a group with the schedule's peak and minimum as `max_lr` and `min_lr`. The operations on floats and
  their order are the same. [test_lr_schedule: the_rate_is_megatrons_at_any_progress]
- Beyond the budget the rate is `minimum`, unless the schedule is constant.
  [test_lr_schedule: beyond_the_budget_the_rate_is_the_minimum]
- A schedule is valid when made. [test_lr_schedule: a_contradictory_schedule_is_refused]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias

from tidegate.lr.errors import BudgetRefused, NominalRefused, ScheduleRefused

Steps: TypeAlias = int | Fraction


class Decay(StrEnum):
    """Megatron's names of the decay styles."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQUARE_ROOT = "inverse-square-root"
    WSD = "WSD"
    """Warm-up, stable, decay: the peak until `wsd_steps` before the budget's end."""


class WsdDecay(StrEnum):
    """The form of the decay at the end of WSD."""

    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"
    MINUS_SQRT = "minus_sqrt"


def exact_steps(value: object, name: str = "nominal") -> Fraction:
    """A positive number of steps. NominalRefused: any other value of any type."""
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise NominalRefused(f"{name}={value!r} is not exact: give an int or a Fraction, such as Fraction(3, 4)")
    if value <= 0:
        raise NominalRefused(f"{name}={value} is not above 0: report a batch that trains nothing as empty")
    return Fraction(value)


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """The rate rises from `initial` to `peak` over `warm_up` steps and is `minimum` after `budget` steps."""

    peak: float
    budget: Steps
    """The steps until the end of the decay, the warm-up included."""
    warm_up: Steps = 0
    decay: Decay = Decay.CONSTANT
    initial: float = 0.0
    minimum: float = 0.0
    wsd_steps: Steps = 0
    """For WSD: the number of steps at the end of the budget over which the rate falls."""
    wsd_decay: WsdDecay = WsdDecay.LINEAR

    def __post_init__(self) -> None:
        for name in ("budget", "warm_up", "wsd_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | Fraction) or value < 0:
                raise ScheduleRefused(f"{name}={value!r} is no number of steps: give an int or a Fraction from 0")
        if self.budget < 1:
            raise BudgetRefused(f"budget={self.budget} is less than one step: a schedule needs one or more")
        if not all(math.isfinite(rate) for rate in (self.peak, self.initial, self.minimum)):
            raise ScheduleRefused(f"rates {self.initial}, {self.peak}, {self.minimum} must be finite")
        if not (0 <= self.minimum <= self.peak and 0 <= self.initial <= self.peak):
            raise ScheduleRefused(
                f"initial={self.initial} and minimum={self.minimum} must lie between 0 and the peak, {self.peak}"
            )
        if self.decay is not Decay.CONSTANT and self.warm_up >= self.budget:
            raise ScheduleRefused(
                f"warm_up={self.warm_up} steps leave nothing of a budget of {self.budget} to decay over: shorten the "
                "warm-up or train longer"
            )
        if self.decay is Decay.WSD and not 0 < self.wsd_steps <= self.budget - self.warm_up:
            raise ScheduleRefused(
                f"wsd_steps={self.wsd_steps} must be above 0 and fit the {self.budget - self.warm_up} steps that "
                f"follow the warm-up (budget={self.budget}, warm_up={self.warm_up})"
            )

    def rate(self, progress: Steps) -> float:
        """The rate of an update at this progress."""
        if self.warm_up > 0 and progress <= self.warm_up:
            return self.initial + (self.peak - self.initial) * float(progress) / float(self.warm_up)
        if self.decay is Decay.CONSTANT:
            return self.peak
        if progress > self.budget:
            return self.minimum
        if self.decay is Decay.INVERSE_SQUARE_ROOT:
            return max(self.minimum, self.peak * math.pow(max(self.warm_up, 1), 0.5) / math.pow(max(progress, 1), 0.5))
        return self.minimum + self._height(progress) * (self.peak - self.minimum)

    def _height(self, progress: Steps) -> float:
        """The height of the curve after the warm-up, from 1 at the peak to 0 at the minimum."""
        if self.decay is Decay.WSD:
            fall = progress - (self.budget - self.wsd_steps)
            return 1.0 if fall <= 0 else _wsd_height(self.wsd_decay, float(fall) / float(self.wsd_steps))
        passed = float(progress - self.warm_up) / float(self.budget - self.warm_up)
        return 1.0 - passed if self.decay is Decay.LINEAR else _half_cosine(passed)


def _half_cosine(passed: float) -> float:
    return 0.5 * (math.cos(math.pi * passed) + 1.0)


def _wsd_height(style: WsdDecay, passed: float) -> float:
    match style:
        case WsdDecay.LINEAR:
            return 1.0 - passed
        case WsdDecay.COSINE:
            return _half_cosine(passed)
        case WsdDecay.EXPONENTIAL:
            return 2.0 * math.pow(0.5, passed) - 1.0
        case WsdDecay.MINUS_SQRT:
            return 1.0 - math.sqrt(passed)
