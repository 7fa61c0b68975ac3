"""How fast the trainer is on any number of GPUs: as it was told to be, put right by what its minibatches took. Pure.

What is told, by the config or by whoever simulates, are a few numbers of GPUs with their rates: straight between them
on logarithmic axes, beyond them a power of the GPUs with `TRAINER_EXPONENT`. What was measured, in this iteration or in
earlier ones, says by how much that is off in the layouts that were trained in: between two of these the correction is a
power of the GPUs, beyond them the nearest one's. So one minibatch puts all layouts right by the same factor, and every
further layout bends the curve. Only layouts of such copies count as the actor is at home in now, since a policy changes
no more than their number; the others where none of these was measured, as in the first minibatch after an operator
changed tp. The curve is of minibatches that divide over the data-parallel copies; one that does not
runs at the pace of the copy with most of it, as it was measured where it was.

Invariants: what is measured in a layout is what is predicted of it; measured as told changes nothing, to the bit; every
prediction of the trainer (`cluster`, and with it `forecast`, and `stages`) is this curve's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.outlook import minibatch_sizes
from services.scheduler.policy.situation import Situation
from services.scheduler.state.observed import Floats, Ints, TrainerRate
from tidegate.types import Layout, Role

TRAINER_EXPONENT = 0.4
"""Of the trainer's rate over its GPUs: what a calibration to RLinf's published timeline of 64 GPUs gives. With 1 the
published dynamic timeline cannot be had: growing the trainer would pay much more."""

DIGITS = 6
"""Of the logarithm of a correction: what is less is the rounding of two ways to write one rate, and nobody measures a
rate to a millionth."""


@dataclass(frozen=True, slots=True)
class Line:
    """Straight between its points, on logarithmic axes; `sizes` are sorted."""

    sizes: Floats
    values: Floats

    def at(self, log_sizes: Floats) -> Floats:
        """Beyond its ends as it is there."""
        values: Floats = np.interp(log_sizes, self.sizes, self.values)
        return values


@dataclass(frozen=True, slots=True)
class TrainerCurve:
    """See the module. `num_sequences` are those of a minibatch; `correction` is added to the logarithm, None before a
    minibatch was measured."""

    num_sequences: int
    told: Line
    correction: Line | None = None

    def tokens_per_s(self, copies: Ints, *, copy_size: int) -> Floats:
        """By the number of copies, at least one, with so many GPUs each."""
        size = np.log(copies * copy_size)
        logs = _as_told(self.told, size)
        even = np.exp(logs if self.correction is None else logs + self.correction.at(size))
        rates: Floats = even / _slowest_share(copies, self.num_sequences)
        return rates


def trainer_curve(situation: Situation) -> TrainerCurve:
    """Of several measured on as many GPUs the last counts."""
    spec = situation.spec
    measured = _of_copies_like(spec.placement[Role.ACTOR].layout, situation.trainer.training.measured)
    sequences = max(minibatch_sizes(situation.generation.num_groups, spec.num_minibatches)) * spec.group_size
    told = _line(spec.rates.trainer)
    if not measured:
        return TrainerCurve(sequences, told)
    found = _line((each.layout.num_ranks, _if_even(each, sequences)) for each in measured)
    off = Line(found.sizes, np.round(found.values - _as_told(told, found.sizes), DIGITS))
    return TrainerCurve(sequences, told, off)


def _of_copies_like(home: Layout, measured: tuple[TrainerRate, ...]) -> tuple[TrainerRate, ...]:
    """All where there is none."""
    copy = replace(home, dp=1)
    return tuple(each for each in measured if replace(each.layout, dp=1) == copy) or measured


def _if_even(measured: TrainerRate, num_sequences: int) -> float:
    return measured.rate_tokens_per_s * float(_slowest_share(np.array([measured.layout.dp]), num_sequences)[0])


def _slowest_share(copies: Ints, num_sequences: int) -> Floats:
    """How many times a fair share the copy has that has most of a minibatch."""
    share: Floats = -(-num_sequences // copies) * copies / num_sequences
    return share


def _line(points: Iterable[tuple[int, float]]) -> Line:
    """Through rates by GPUs."""
    sizes, rates = zip(*sorted(dict(points).items()), strict=True)
    return Line(np.log(sizes), np.log(rates))


def _as_told(told: Line, size: Floats) -> Floats:
    beyond = np.minimum(size - told.sizes[0], 0.0) + np.maximum(size - told.sizes[-1], 0.0)
    logs: Floats = told.at(size) + TRAINER_EXPONENT * beyond
    return logs
