"""Searches a good schedule of an iteration with known lengths. Every switch has its real cost. It may not be optimal.

The search covers `schedules.Schedule`, which is more than any policy here can choose. Every candidate is run.
1. It begins at the schedules of policies (`tide`, and others), at shapes by the size of the cluster, and at plans that
   a forecast screens for random orders of sequences (`screening`).
2. In the first `APART` runs it improves the best candidates of each origin, so that the first good one does not
   displace the others.
3. After that it improves the best candidates of all origins.
A step does one of these: it changes a few values of a good schedule, joins two of them, searches a plan for a changed
order by forecast, or makes a random schedule. The true optimum may be shorter, but never shorter than the bound
(`simulator.bound`).

The same scenario, seed and number of evaluations give the same schedule. More evaluations never give a longer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.clairvoyant.orders import Keys, Order, changed_order, random_order, sequences_in
from benchmarks.clairvoyant.policy_schedules import begins_of
from benchmarks.clairvoyant.schedules import PARTS, Schedule, in_parts, run_schedule
from benchmarks.clairvoyant.screening import Plan, Screen
from benchmarks.direct import simulate
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.layouts import replica_size
from simulator.iteration import SimulatedIteration
from simulator.policies import Contender
from simulator.scenario import Scenario
from tidegate.types import MinibatchOrder, Role

KEPT, KEPT_APART = 4, 2
"""The number of candidates that the search keeps: of all, and of each origin in the first `APART` runs. An origin
counts there if its best candidate takes at most `NEAR` times as long as the best of all."""
APART, NEAR = 80, 1.08
SCREENED, SCREENED_KEPT = 160, (7, 2)
"""The number of random orders with a forecast, and how many of them are run: by levels, and by slack. Forecasts by
slack are less exact. The plans for an order take a sixth of a run."""
SHAPES = ((0.08, (0.18, 0.8), 0.25), (0.13, (0.18, 0.85), 0.25), (0.2, (0.25, 0.85), 0.0))
"""The start as a share of tide's iteration; the trainer's GPUs of the first and the last minibatch as shares of all;
and the share of the shortest prompts that come between the longest."""
FIXED_SHAPES = ((0.35, (0.3, 0.9), 0.0), (0.5, (0.5, 0.9), 0.0), (0.65, (0.9, 0.9), 0.0))
"""The same for a fixed order. The inference has its GPUs at this share of the start:"""
AHEAD = 0.75
STARTS_S = (-30.0, -10.0, -3.0, -1.0, 1.0, 3.0, 10.0, 30.0)
"""Changes of the start in an iteration of 600 s."""
WAITS = (-0.3, -0.1, 0.1, 0.3)
RANDOM, JOINED, REPLANNED = 12, 8, 6
"""One candidate in this number is random, joins two good ones, or has its plan from a search by forecast."""


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate with its time. `origin` names the beginning that led to it, and `nth` is the number of its run from
    1."""

    seconds: float
    schedule: Schedule
    order: Order
    origin: str
    nth: int


class _Search:
    """The search for one iteration."""

    def __init__(self, simulated: SimulatedIteration, scale: float, *, by_hints: bool) -> None:
        self._simulated, self._scale = simulated, scale
        self._keys = Keys.of(simulated.workload, by_hints=by_hints)
        self._screen = Screen(simulated)
        self._num_gpus = len(simulated.scenario.cluster.gpus())
        self._unit = replica_size(simulated.spec.placement[Role.ACTOR].layout)
        self._num_minibatches = simulated.spec.num_minibatches
        # The paces in `orders` hold for 512 groups of 7,000 tokens, as in the published iteration.
        self._pace_scale = float(self._keys.lengths.mean()) / 7000 * 512 / simulated.workload.num_groups
        self._num_runs = 0
        self.rng = np.random.default_rng(simulated.seed)

    def run(self, schedule: Schedule, order: Order, origin: str) -> Found:
        self._num_runs += 1
        placed = replace(schedule, order=sequences_in(order, self._keys))
        return Found(run_schedule(self._simulated, placed).now_s, placed, order, origin, self._num_runs)

    def shapes(self, own_s: float) -> Iterator[tuple[Schedule, Order, str]]:
        along = np.linspace(0.0, 1.0, self._num_minibatches)
        is_fixed = self._keys.is_fixed
        for start, (first, last), share in FIXED_SHAPES if is_fixed else SHAPES:
            trainer = tuple(int(each) for each in np.round(self._num_gpus * first ** (1 - along) * last**along))
            inference = (max(1, round(self._num_gpus / 11)),) * (PARTS * self._num_minibatches)
            infer_s = AHEAD * start * own_s if is_fixed else None
            schedule = Schedule(start * own_s, trainer, inference, infer_s=infer_s)
            yield schedule, Order(share=share, by_minibatch=is_fixed), "shape"

    def screened(self) -> Iterator[tuple[Schedule, Order, str]]:
        """The plans with the best forecasts for random orders."""
        found = []
        for _ in range(SCREENED):
            order = self._random_order()
            found.append((self._screen.plan(sequences_in(order, self._keys), self.rng), order))
        found.sort(key=lambda each: each[0].end_s)
        levels, slack = ([each for each in found if (each[1].pace is None) == is_level] for is_level in (True, False))
        for plan, order in (*levels[: SCREENED_KEPT[0]], *slack[: SCREENED_KEPT[1]]):
            yield _planned(Schedule(0.0, (), ()), plan, order), order, "screened"

    def step(self, best: list[Found]) -> Found:
        """Make and run another candidate."""
        rng = self.rng
        # Take the better of two random ones.
        found = best[int(rng.integers(len(best), size=2).min())]
        if not rng.integers(RANDOM):
            return self.run(
                self._random_schedule(),
                self._random_order() if rng.integers(2) else found.order,
                "drawn",
            )
        if not rng.integers(REPLANNED):
            return self._replanned(found)
        if len(best) > 1 and not rng.integers(JOINED):
            return self._joined(found, best[int(rng.integers(len(best)))])
        schedule, order = found.schedule, found.order
        for _ in range(int(rng.integers(1, 5))):
            schedule, order = self._changed(schedule, order)
        return self.run(schedule, order, found.origin)

    def _random_schedule(self) -> Schedule:
        """A random schedule: a better one may be too many steps away from the present best ones."""
        rng = self.rng
        most = max(1, (self._num_gpus - 1) // self._unit)
        trainer = self._unit * np.sort(rng.integers(1, most + 1, self._num_minibatches))
        inference = rng.integers(1, max(1, self._num_gpus // 6) + 2, PARTS * self._num_minibatches)
        start_s = float(rng.uniform(0.0, 0.8 if self._keys.is_fixed else 0.3)) * 600.0 * self._scale
        infer_s = start_s * float(rng.uniform(0.5, 1.0)) if self._keys.is_fixed else None
        return Schedule(start_s, tuple(trainer.tolist()), tuple(inference.tolist()), infer_s=infer_s)

    def _random_order(self) -> Order:
        return random_order(self._pace_scale, self.rng, is_fixed=self._keys.is_fixed)

    def _changed_order(self, order: Order) -> Order:
        return changed_order(order, self._pace_scale, self.rng, is_fixed=self._keys.is_fixed)

    def _replanned(self, found: Found) -> Found:
        order = self._changed_order(found.order)
        plan = self._screen.near(sequences_in(order, self._keys), found.schedule)
        return self.run(_planned(found.schedule, plan, order), order, found.origin)

    def _joined(self, one: Found, other: Found) -> Found:
        """The schedule of one with the order of the other, or with the inference's GPUs of the other."""
        if self.rng.integers(2):
            return self.run(_back_as_begun(one.schedule, other.order), other.order, one.origin)
        return self.run(replace(one.schedule, inference=other.schedule.inference), one.order, one.origin)

    def _changed(self, schedule: Schedule, order: Order) -> tuple[Schedule, Order]:
        rng = self.rng
        match int(rng.integers(10)):
            case 0 | 1:
                return self._shifted(schedule), order
            case 2 | 3 | 4:
                return replace(schedule, trainer=self._stepped(schedule.trainer, self._unit)), order
            case 5 | 6:
                return replace(schedule, inference=self._stepped(schedule.inference, 1)), order
            case 7:
                return self._held(schedule), order
            case _:
                order = self._changed_order(order)
                return _back_as_begun(schedule, order), order

    def _shifted(self, schedule: Schedule) -> Schedule:
        """The schedule with another start of the trainer, of the inference ahead of it, or of both."""
        by_s = float(self.rng.choice(STARTS_S)) * self._scale
        infer_s, what = schedule.infer_s, 0 if schedule.infer_s is None else int(self.rng.integers(3))
        start_s = schedule.start_s if what == 2 else max(0.0, schedule.start_s + by_s)
        infer_s = infer_s if infer_s is None or what == 1 else max(0.0, infer_s + by_s)
        return replace(schedule, start_s=start_s, infer_s=infer_s)

    def _held(self, schedule: Schedule) -> Schedule:
        """The schedule with another wait of a minibatch, or with another order of returned sequences."""
        rng, num = self.rng, self._num_minibatches
        if not rng.integers(3):
            return replace(schedule, soonest_back=not schedule.soonest_back)
        waits, lends = list(schedule.waits or (0.0,) * num), list(schedule.lends or (False,) * num)
        at = int(rng.integers(num))
        waits[at] = min(1.0, max(0.0, waits[at] + float(rng.choice(WAITS))))
        lends[at] = bool(rng.integers(2))
        return replace(schedule, waits=tuple(waits), lends=tuple(lends))

    def _stepped(self, sizes: tuple[int, ...], unit: int) -> tuple[int, ...]:
        """The sizes, with one of them or one and all later ones changed by one or more units."""
        rng, step = self.rng, unit * max(1, round(self._num_gpus / 16 / unit))
        at, by = int(rng.integers(len(sizes))), int(rng.choice((-step, -unit, unit, step)))
        until = len(sizes) if not rng.integers(3) else at + 1
        most = max(unit, (self._num_gpus - 1) // unit * unit)
        return tuple(min(most, max(unit, size + by)) if at <= nth < until else size for nth, size in enumerate(sizes))


def clairvoyant_schedule(
    scenario: Scenario,
    *,
    seed: int | None = None,
    evaluations: int = 200,
    others: Mapping[str, Contender] | None = None,
    by_hints: bool = False,
) -> Found:
    """The best schedule of `evaluations` runs. The search begins also at the schedules of `others`, besides tide's.
    `by_hints`: orders are made from hints alone, and are still those that turn out best.

    ValueError: fewer evaluations than the search begins with. Other errors are those of `simulate`.
    """
    among = {"tide": Contender(scenario, TidePolicy()), **(others or {})}
    num_orders = 2 if scenario.algorithm.minibatch_order is MinibatchOrder.FIXED else 1
    fewest = num_orders * len(among) + len(SHAPES) + sum(SCREENED_KEPT)
    if evaluations < fewest:
        raise ValueError(f"evaluations={evaluations}: the search begins with {fewest}; allow at least as many")
    runs = {name: simulate(each.scenario, each.policy, seed=seed, directly=True) for name, each in among.items()}
    own = runs["tide"]
    simulated = SimulatedIteration(scenario, own.seed)
    search = _Search(simulated, own.iteration_s / 600.0, by_hints=by_hints)
    begins = [each for name, run in runs.items() for each in begins_of(run, name, simulated)]
    begins += [*search.shapes(own.iteration_s), *search.screened()]
    best = [search.run(*each) for each in begins]
    for nth in range(len(begins), evaluations):
        best = best_candidates(best, is_apart=nth < APART)
        candidate = search.step(best)
        if all(candidate.seconds != each.seconds for each in best):
            best.append(candidate)
    return min(best, key=_seconds)


def best_candidates(found: list[Found], *, is_apart: bool) -> list[Found]:
    """The best candidates in order: of all, or of each origin."""
    ordered = sorted(found, key=_seconds)
    if not is_apart:
        return ordered[:KEPT]
    of_origin: dict[str, list[Found]] = {}
    for each in ordered:
        of_origin.setdefault(each.origin, []).append(each)
    near = [own for own in of_origin.values() if own[0].seconds <= NEAR * ordered[0].seconds]
    return sorted((each for own in near for each in own[:KEPT_APART]), key=_seconds)


def _seconds(found: Found) -> float:
    return found.seconds


def _back_as_begun(schedule: Schedule, order: Order) -> Schedule:
    """The schedule with the right order of returned sequences.

    In an order by slack they keep their places, which count the remaining work already. Soonest first took up to 100 s
    longer.
    """
    return replace(schedule, soonest_back=order.pace is None)


def _planned(schedule: Schedule, plan: Plan, order: Order) -> Schedule:
    """The schedule with the starts and GPUs of a plan for this order."""
    inference = in_parts(plan.inference)
    own = replace(schedule, start_s=plan.start_s, trainer=plan.trainer, inference=inference, infer_s=plan.infer_s)
    return _back_as_begun(own, order)
