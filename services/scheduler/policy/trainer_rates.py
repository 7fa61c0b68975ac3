"""How fast the trainer is on any number of GPUs: the assumed rates, corrected by measured ones. Pure.

The config, or the simulator, gives rates for a few numbers of GPUs. The curve through them is straight on logarithmic
axes. Beyond them it goes on as its outermost segment there, with a power of the GPUs from 0 to 1. Where one number of
GPUs alone has a rate, rates are in proportion to the GPUs.

What was measured, in this iteration or in earlier ones, gives the correction in the layouts that were trained in:

    log rate(num_gpus) = log assumed(num_gpus) + correction(num_gpus)
    correction    log measured - log assumed at a measured layout; straight in log num_gpus between two of them; beyond
                  them that of the nearest one

So one measured minibatch corrects all layouts by the same factor, and every further layout bends the curve.

The curve is that of one kind of copy, such as those of the actor's home: only measurements in layouts of such copies
count. Where there is none, all count, as in the first minibatch after an operator changed tp. So kinds of copies differ
where that was measured, or where the job's rates are given by layout (`Rates.by_layout`).

The curve is for minibatches that divide over the data-parallel copies. One that does not runs at the pace of the copy
with the most of it; measurements are converted likewise.

Invariants:
- The prediction for a layout is what was measured in it. [test_trainer_rates: prediction_is_what_was_measured]
- A measurement equal to the assumption changes nothing, to the bit. [test_trainer_rates: changes_nothing_to_the_bit]
- Every prediction of the trainer's speed is this curve's, in `tide/cluster` and in `stages`.
  [test_trainer_rates: every_policy_reckons]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.situation import Situation, minibatch_sizes
from services.scheduler.state.costs import Rates
from services.scheduler.state.observed import Floats, Ints, TrainerRate
from tidegate.types import Layout, Role

DIGITS = 6
"""Decimal digits of the logarithm of a correction. Smaller differences are rounding between two ways to write one rate,
and no rate is measured to a millionth."""


@dataclass(frozen=True, slots=True)
class Line:
    """Straight between its points, on logarithmic axes; `sizes` are sorted."""

    sizes: Floats
    values: Floats

    def at(self, log_sizes: Floats) -> Floats:
        """Beyond its ends the value of the nearer end."""
        values: Floats = np.interp(log_sizes, self.sizes, self.values)
        return values


@dataclass(frozen=True, slots=True)
class TrainerCurve:
    """The module's formula. `num_sequences`: of a minibatch. `correction`: None before a minibatch was measured."""

    num_sequences: int
    assumed: Line
    correction: Line | None = None

    def tokens_per_s(self, copies: Ints, *, copy_size: int) -> Floats:
        """By number of copies, each at least 1; a copy has `copy_size` GPUs."""
        size = np.log(copies * copy_size)
        logs = _as_assumed(self.assumed, size)
        even = np.exp(logs if self.correction is None else logs + self.correction.at(size))
        rates: Floats = even / _slowest_share(copies, self.num_sequences)
        return rates


def trainer_curve(situation: Situation, copy: Layout | None = None) -> TrainerCurve:
    """The curve of copies like those of the layout; None: like those of the actor's home. The last of several
    measurements on the same number of GPUs counts."""
    spec = situation.spec
    kind = spec.placement[Role.ACTOR].layout if copy is None else copy
    measured = _of_copies_like(kind, situation.trainer.training.measured)
    sequences = num_sequences(situation)
    assumed = _line(_assumed(spec.rates, kind))
    if not measured:
        return TrainerCurve(sequences, assumed)
    found = _line((each.layout.num_ranks, _if_even(each, sequences)) for each in measured)
    off = Line(found.sizes, np.round(found.values - _as_assumed(assumed, found.sizes), DIGITS))
    return TrainerCurve(sequences, assumed, off)


def num_sequences(situation: Situation) -> int:
    """The sequences of a minibatch."""
    spec = situation.spec
    return max(minibatch_sizes(situation.generation.num_groups, spec.num_minibatches)) * spec.group_size


def _assumed(rates: Rates, kind: Layout) -> Iterable[tuple[int, float]]:
    """Those of the kind's layouts where the job gives some, else those by number of GPUs alone."""
    copy = replace(kind, dp=1)
    own = [(layout.num_ranks, rate) for layout, rate in rates.by_layout if replace(layout, dp=1) == copy]
    return own or rates.trainer


def _of_copies_like(kind: Layout, measured: tuple[TrainerRate, ...]) -> tuple[TrainerRate, ...]:
    """The measurements in layouts that differ from `kind` in dp alone; all measurements where there is no such one."""
    copy = replace(kind, dp=1)
    return tuple(each for each in measured if replace(each.layout, dp=1) == copy) or measured


def _if_even(measured: TrainerRate, num_sequences: int) -> float:
    return measured.rate_tokens_per_s * float(_slowest_share(np.array([measured.layout.dp]), num_sequences)[0])


def _slowest_share(copies: Ints, num_sequences: int) -> Floats:
    """The largest share of a minibatch that a copy has, over a fair share."""
    share: Floats = -(-num_sequences // copies) * copies / num_sequences
    return share


def _line(points: Iterable[tuple[int, float]]) -> Line:
    """Through points (number of GPUs, rate)."""
    sizes, rates = zip(*sorted(dict(points).items()), strict=True)
    return Line(np.log(sizes), np.log(rates))


def _as_assumed(assumed: Line, size: Floats) -> Floats:
    below, above = _outer_powers(assumed)
    before, after = np.minimum(size - assumed.sizes[0], 0.0), np.maximum(size - assumed.sizes[-1], 0.0)
    logs: Floats = assumed.at(size) + below * before + above * after
    return logs


def _outer_powers(assumed: Line) -> tuple[float, float]:
    """The powers of the GPUs below and above the line. More GPUs are never told to be slower, nor faster than in
    proportion: two rates that are close to each other may say either by an error of measurement."""
    if assumed.sizes.size == 1:
        return 1.0, 1.0
    powers = np.clip(np.diff(assumed.values) / np.diff(assumed.sizes), 0.0, 1.0)
    return float(powers[0]), float(powers[-1])
