"""Which layout the trainer has on any number of GPUs, and its speed there. Pure.

A policy chooses a number of GPUs. The layouts that the trainer may have are

- copies like those of its home, in any number from `JobSpec.fewest_actor_copies` on;
- the layouts that the job allows besides (`JobSpec.layouts`): a kind of copy with another tp, pp, cp, ep or vpp.

On a number of GPUs it has

1. the layout that it has now, where that has exactly these GPUs;
2. else, of each kind of copy as many as fit, and of the kinds the one with the highest predicted rate
   (`trainer_rates`);
3. of kinds with the same rate that of its home, then the one with the most copies. So it is before anything was
   measured, where kinds have as many GPUs.

GPUs are counted in steps: the largest number that every kind of copy is a multiple of.

Invariants:
- More GPUs are never slower for want of a layout: where a number of GPUs makes no layout, a smaller one counts.
  [test_cluster: never_fall_where_a_larger_layout]
- Every layout is one that the job allows. [test_actor_layouts: every_layout_is_one_that_the_job_allows]
- Kinds of which nothing is known to differ leave the home's in its place.
  [test_actor_layouts: before_anything_is_measured]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from services.scheduler.policy.situation import Situation
from services.scheduler.policy.trainer_rates import DIGITS, trainer_curve
from services.scheduler.state.costs import Costs
from services.scheduler.state.layouts import replica_size, with_dp
from services.scheduler.state.observed import Floats, Ints
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Layout, Role

TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True)
class Kind:
    """Layouts that differ in dp alone. `copy`: the layout with one copy. `numbers`: the legal dp, ascending."""

    copy: Layout
    numbers: Ints

    def fitting(self, num_gpus: Ints) -> Ints:
        """The most copies on each number of GPUs; 0 where not even the fewest fit."""
        at = np.searchsorted(self.numbers * self.copy.num_ranks, num_gpus, side="right")
        most: Ints = np.concatenate(([0], self.numbers))[at]
        return most


@dataclass(frozen=True)
class ActorLayouts:
    """By number of steps, from 0: the kind, its copies (0: no layout fits), and tokens a second (0 likewise).

    step: GPUs. fewest: GPUs of the smallest copy.
    """

    step: int
    fewest: int
    kinds: tuple[Kind, ...]
    kind_of: Ints
    copies: Ints
    rates: Floats

    def steps(self, num_gpus: int) -> int:
        """At most those that are known."""
        return min(num_gpus // self.step, len(self.rates) - 1)

    def on(self, num_gpus: int) -> Layout | None:
        """The layout on at most so many GPUs; None where none fits."""
        steps = self.steps(num_gpus)
        copies = int(self.copies[steps])
        return replace(self.kinds[self.kind_of[steps]].copy, dp=copies) if copies else None

    def num_ranks(self, num_gpus: int) -> int:
        layout = self.on(num_gpus)
        return layout.num_ranks if layout else 0

    def placed(self, gpus: tuple[GpuId, ...]) -> Placed | None:
        """The layout on these GPUs, in their order. The GPUs beyond it get no rank."""
        layout = self.on(len(gpus))
        return Placed(gpus[: layout.num_ranks], layout) if layout else None

    def most_like(self, layout: Layout, gpus: tuple[GpuId, ...]) -> Placed | None:
        """As many copies like those of the layout as fit; None where it is of no allowed kind, or none fits."""
        copy = replace(layout, dp=1)
        for kind in self.kinds:
            if kind.copy == copy and (dp := int(kind.fitting(np.array([len(gpus)]))[0])):
                return Placed(gpus[: dp * copy.num_ranks], replace(copy, dp=dp))
        return None

    def switches_s(self, costs: Costs) -> Floats:
        """Seconds from one number of steps to another, [before, after]."""
        if len(self.kinds) == 1:
            return costs.trainer_switches_s(copy_size=self.step, most=len(self.rates) - 1)
        seconds = np.full((len(self.rates),) * 2, costs.reshard_s)
        of_kind = [np.flatnonzero((self.kind_of == at) & (self.copies > 0)) for at in range(len(self.kinds))]
        for before, rows in enumerate(of_kind):
            for after, columns in enumerate(of_kind):
                if rows.size and columns.size:
                    block = self._kind_switches_s(costs, before, after)
                    seconds[np.ix_(rows, columns)] = block[np.ix_(self.copies[rows], self.copies[columns])]
        seconds[self.copies == 0] = costs.load_s
        np.fill_diagonal(seconds, 0.0)
        return seconds

    def _kind_switches_s(self, costs: Costs, before: int, after: int) -> Floats:
        sizes = self.kinds[before].copy.num_ranks, self.kinds[after].copy.num_ranks
        most = int(self.copies.max())
        if before == after:
            return costs.trainer_switches_s(copy_size=sizes[0], most=most)
        return costs.trainer_reshapes_s(copy_size=sizes[0], new_size=sizes[1], most=most)


def step_of(spec: JobSpec) -> int:
    """GPUs of a step."""
    return gcd(*(replica_size(layout) for layout in (spec.placement[Role.ACTOR].layout, *spec.layouts)))


def fewest_gpus(spec: JobSpec) -> int:
    """GPUs of the smallest layout."""
    home = spec.fewest_actor_copies * replica_size(spec.placement[Role.ACTOR].layout)
    return min([home, *(layout.num_ranks for layout in spec.layouts)])


def is_allowed(spec: JobSpec, layout: Layout) -> bool:
    home = spec.placement[Role.ACTOR].layout
    own = with_dp(home, layout.dp, num_shards=spec.num_logical_shards)
    return (layout == own and layout.dp >= spec.fewest_actor_copies) or layout in spec.layouts


def actor_layouts(situation: Situation, num_gpus: int, *, most_copies: int | None = None) -> ActorLayouts:
    """For up to `num_gpus` GPUs, with at most `most_copies` copies."""
    spec, step = situation.spec, step_of(situation.spec)
    kinds = tuple(_kinds(spec, num_gpus, num_gpus if most_copies is None else most_copies))
    sizes = np.arange(num_gpus // step + 1) * step
    copies_KN = np.stack([kind.fitting(sizes) for kind in kinds])
    rates_KN = np.stack([_rates(situation, *each) for each in zip(kinds, copies_KN, strict=True)])
    kind_of, across = _preferred(copies_KN, rates_KN), np.arange(len(sizes))
    copies, rates = copies_KN[kind_of, across], rates_KN[kind_of, across]
    found = ActorLayouts(step, fewest_gpus(spec), kinds, kind_of, copies, rates)
    return found if len(kinds) == 1 else _with_present(found, situation)


def _preferred(copies_KN: Ints, rates_KN: Floats) -> Ints:
    """The kind for each number of steps. Rates that differ by less than their rounding are equal."""
    logs_KN = np.round(np.log(np.maximum(rates_KN, TINY)), DIGITS)
    preference_KN = copies_KN.copy()
    preference_KN[0] = np.where(copies_KN[0] > 0, copies_KN.max() + 1, 0)
    preferred: Ints = np.where(logs_KN == logs_KN.max(axis=0), preference_KN, -1).argmax(axis=0)
    return preferred


def _with_present(found: ActorLayouts, situation: Situation) -> ActorLayouts:
    """The trainer's present layout on as many GPUs as it has: a change that moves no GPU is not made."""
    placed = situation.trainer.placed
    if placed is None or placed.layout.num_ranks % found.step or found.on(placed.layout.num_ranks) == placed.layout:
        return found
    at, copy = placed.layout.num_ranks // found.step, replace(placed.layout, dp=1)
    if at >= len(found.rates) or not is_allowed(situation.spec, placed.layout):
        return found
    kind = next((nth for nth, each in enumerate(found.kinds) if each.copy == copy), None)
    if kind is None:
        return found
    kind_of, copies, rates = found.kind_of.copy(), found.copies.copy(), found.rates.copy()
    kind_of[at], copies[at] = kind, placed.layout.dp
    rates[at] = _rates(situation, found.kinds[kind], copies[at : at + 1])[0]
    return replace(found, kind_of=kind_of, copies=copies, rates=rates)


def _kinds(spec: JobSpec, num_gpus: int, most: int) -> Iterator[Kind]:
    """That of the home first, then the others in the job's order."""
    home = replace(spec.placement[Role.ACTOR].layout, dp=1)
    fewest = spec.fewest_actor_copies
    dp = np.arange(fewest, max(fewest, min(most, num_gpus // home.num_ranks)) + 1)
    # The rule of `with_dp`, for all numbers of copies at once.
    yield Kind(home, dp[(dp * home.cp % home.ep == 0) & ((spec.num_logical_shards or 0) % dp == 0)])
    others: dict[Layout, list[int]] = {}
    for layout in spec.layouts:
        if (copy := replace(layout, dp=1)) != home and layout.dp <= most:
            others.setdefault(copy, []).append(layout.dp)
    for copy, numbers in others.items():
        yield Kind(copy, np.array(sorted(numbers)))


def _rates(situation: Situation, kind: Kind, copies: Ints) -> Floats:
    tokens_per_s = trainer_curve(situation, kind.copy).tokens_per_s(
        np.maximum(copies, 1), copy_size=kind.copy.num_ranks
    )
    return np.where(copies > 0, tokens_per_s, 0.0)
