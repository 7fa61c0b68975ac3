"""Which plans are worth forecasting, and the search among them: steepest descent from the remembered plan.

Each round forecasts all neighbours of the best plan at once and takes the best of them. A neighbour differs in one of

- the time at which the trainer starts, or inference ahead of it, by a little;
- the trainer's GPUs in one minibatch;
- GPUs that the trainer takes from inference, or gives to it, in one of the next two minibatches, or from it on. Where
  inference is dear its work is shared among minibatches: more of it in one alone only makes it wait in the next.

Without a remembered plan the search begins in a coarse family. A plan of it has a start, and a first and a last number
of trainer GPUs. The steps between the two are geometric, because a trainer's rate is a power of its GPUs. Neighbours of
a plan that starts early all start early, so the search goes on from the best plans of several starts side by side.

In a fixed order the trainer waits for the lowest number, so that it has little to do until the rollout's tail. There
the family has more plans that start early, and others that start it late, and inference ahead of it.

Invariants:
- Every plan that is tried is legal. The trainer has one or more whole data-parallel copies of an existing layout.
  Inference has a GPU while groups are left for it. No component has more GPUs than there are.
  [test_foresight: every_neighbour_of_a_plan]
- The same picture gives the same plan. [test_tide_policy: the_same_situation_gives]

The search stops after `rounds` rounds at the latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

import numpy as np

from services.scheduler.policy.situation import Alternative
from services.scheduler.policy.tide.cluster import Cluster, Plans
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.state.observed import Floats

START_STEPS = (0.008, 0.024, 0.08)
FAMILY_STARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
FIXED_STARTS = (0.0, 0.06, 0.12, 0.18, 0.24, 0.32)
"""Shares of the remaining rollout's time, so that an iteration of a minute and one of an hour are searched alike."""
FAMILY_FIRST = (0.12, 0.2, 0.3, 0.5)
FAMILY_LAST = (0.6, 0.8, 0.95)
FAMILY_INFERENCE = 0.1
"""Shares of all GPUs: the trainer's in the first and in the last minibatch, and those of inference."""
LATE_STARTS = ((0.4, 0.7), (0.55, 0.8), (0.55, 1.0), (0.7, 1.0))
LATE_FIRST = (0.12, 0.3, 0.55)
LATE_INFERENCE = (0.2, 0.3, 0.4)
LATE_LAST = 0.9
"""Plans of a fixed order that start late: when inference and the trainer get GPUs, as shares of the rollout's time;
shares of all GPUs for the trainer and for inference in the first minibatch, and for the trainer in the others. A coarse
grid from the middle of the rollout to its end: the neighbours are searched from there."""

BEGINNINGS = 2
"""Plans of a family from which a search goes on, each with another start. With one alone iterations take 0.4 % longer
in the mean of eleven cells on tuning seeds, and with three 0.2 % less, for which the opening has no time."""

LEAST_GAIN_S = 0.05
"""A round that gains less ends the search: a forecast is no more exact than that."""


@dataclass(frozen=True)
class Found:
    """One plan, and the seconds from now until its end. `weighed`: what it was compared with, for people."""

    plan: Plans
    end_s: float
    weighed: tuple[Alternative, ...] = ()


def best_of(forecast: Forecast, plans: Plans) -> Found:
    """The plan that ends first; of several the first."""
    return _found(plans, forecast.ends_s(plans))


def search(forecast: Forecast, begin: Plans, *, rounds: int) -> Found:
    """Starts at the best of the given plans, one for each of up to `BEGINNINGS` starts, and goes on from each while a
    round gains at least `LEAST_GAIN_S`. A round is one forecast of all their neighbours."""
    begin = not_before(begin, earliest_start_s(forecast))
    plans = [begin] if begin.count == 1 else _best_by_start(begin, forecast.ends_s(begin))
    best: Found | None = None
    for _ in range(rounds):
        near = [_near(forecast, plan) for plan in plans]
        until = np.cumsum([each.count for each in near])
        ends_s = np.split(forecast.ends_s(Plans.of(*near)), until[:-1])
        found = [_improved(each, own_s) for each, own_s in zip(near, ends_s, strict=True)]
        first = min((each for each, _ in found), key=attrgetter("end_s"))
        best = first if best is None or first.end_s < best.end_s else best
        plans = [each.plan for each, is_better in found if is_better]
        if not plans:
            break
    assert best is not None, "a search takes a round at least"
    return best


def _best_by_start(plans: Plans, ends_s: Floats) -> list[Plans]:
    """The best plan of each of the best starts. Starts that differ by less than a tenth of a second are one."""
    by_start: dict[float, int] = {}
    for at in np.argsort(ends_s, kind="stable").tolist():
        by_start.setdefault(round(float(plans.start_s[at]), 1), at)
    return [plans.row(at) for at in list(by_start.values())[:BEGINNINGS]]


def _near(forecast: Forecast, plan: Plans) -> Plans:
    """The plan, and its neighbours."""
    around = neighbours(plan, forecast.cluster, forecast.span_s, infers_ahead=forecast.infers_ahead)
    return Plans.of(plan, not_before(around, earliest_start_s(forecast)))


def _improved(near: Plans, ends_s: Floats) -> tuple[Found, bool]:
    """The plan or, where one gains at least `LEAST_GAIN_S`, its best neighbour; and whether it is a neighbour."""
    best = _found(near, ends_s)
    if best.end_s < ends_s[0] - LEAST_GAIN_S:
        return best, True
    return Found(near.row(0), float(ends_s[0])), False


def _found(plans: Plans, ends_s: Floats) -> Found:
    at = int(ends_s.argmin())
    return Found(plans.row(at), float(ends_s[at]))


def earliest_start_s(forecast: Forecast) -> float:
    """The start with which the trainer has its GPUs when the first group has ended."""
    return max(0.0, forecast.first_s - forecast.costs.release_s - forecast.costs.load_s)


def not_before(plans: Plans, earliest_s: float) -> Plans:
    """Puts off earlier starts: a trainer that has GPUs before it has a group only waits."""
    start_s, infer_s = np.maximum(plans.start_s, earliest_s), np.maximum(plans.infers_s, earliest_s)
    return replace(plans, start_s=start_s, infer_s=infer_s)


def family(cluster: Cluster, num_minibatches: int, span_s: float, *, infers_ahead: bool = False) -> Plans:
    """The coarse family of plans. Where the trainer has begun, all start at once, and one of them moves no further GPU;
    else some start late, up to the rollout's end. `span_s`: seconds that the rollout still takes. `infers_ahead`: more
    of them start early, and late ones begin with inference alone."""
    is_waiting = not (cluster.num_trainer_gpus or cluster.is_open)
    starts = FIXED_STARTS if infers_ahead else FAMILY_STARTS if is_waiting else (0.0,)
    rows = [(span_s * start, first, last) for start in starts for first in FAMILY_FIRST for last in FAMILY_LAST]
    start_s = np.array([row[0] for row in rows])
    first, last = (np.array([row[at] for row in rows])[:, None] for at in (1, 2))
    along = np.linspace(0.0, 1.0, num_minibatches)[None, :] if num_minibatches != 1 else np.ones((1, 1))
    shares = first ** (1 - along) * last**along
    inference = np.full(shares.shape, max(1, round(FAMILY_INFERENCE * cluster.num_gpus)))
    plans = Plans(start_s, np.round(shares * cluster.num_gpus).astype(np.int64), inference)
    if cluster.num_trainer_gpus:
        stays = np.full((1, num_minibatches), cluster.num_trainer_gpus)
        infers = np.full((1, num_minibatches), cluster.num_inference_gpus)
        plans = Plans.of(Plans(np.zeros(1), stays, infers), plans)
    elif infers_ahead:
        plans = Plans.of(plans, _late(cluster, num_minibatches, span_s))
    return legal(plans, cluster)


def _late(cluster: Cluster, num_minibatches: int, span_s: float) -> Plans:
    """Plans whose trainer starts in the rollout's tail or after it, and inference with it or ahead of it."""
    rows = list(product(LATE_STARTS, LATE_INFERENCE, LATE_FIRST))
    last = [LATE_LAST] * (num_minibatches - 1)
    trainer = np.array([[first, *last] for _, _, first in rows])
    inference = np.array([[share, *[FAMILY_INFERENCE] * len(last)] for _, share, _ in rows])
    infer_s, start_s = span_s * np.array([at for at, _, _ in rows]).T
    in_trainer, in_inference = (np.round(each * cluster.num_gpus).astype(np.int64) for each in (trainer, inference))
    return Plans(start_s, in_trainer, in_inference, infer_s=infer_s)


def neighbours(plan: Plans, cluster: Cluster, span_s: float, *, infers_ahead: bool = False) -> Plans:
    """The neighbours of one plan, without itself. `span_s`: seconds that the rollout still takes. `infers_ahead`: some
    differ in when inference starts alone."""
    changes = list(_changes(plan.trainer.shape[1], cluster, span_s, infers_ahead=infers_ahead))
    start = plan.start_s + np.array([change[0] for change in changes])
    infer = plan.infers_s + np.array([change[1] for change in changes])
    trainer = plan.trainer + np.array([change[2] for change in changes], dtype=np.int64)
    inference = plan.inference + np.array([change[3] for change in changes], dtype=np.int64)
    around = legal(Plans(start, trainer, inference, infer), cluster)
    same = (around.start_s == plan.start_s) & (around.infers_s == plan.infers_s)
    same &= (around.trainer == plan.trainer).all(axis=1)
    different = ~(same & (around.inference == plan.inference).all(axis=1))
    return Plans(
        around.start_s[different],
        around.trainer[different],
        around.inference[different],
        around.infers_s[different],
    )


def legal(plans: Plans, cluster: Cluster) -> Plans:
    """Each plan, changed to the nearest legal one."""
    fewest = max(1, int(np.argmax(cluster.unit_rates > 0)))
    least = min(1, cluster.num_gpus - fewest * cluster.unit_size)
    most = max(fewest, (cluster.num_gpus - least) // cluster.unit_size)
    trainer = np.clip(plans.trainer // cluster.unit_size, fewest, most) * cluster.unit_size
    inference = np.clip(plans.inference, least, np.maximum(cluster.num_gpus - trainer, least))
    return Plans(np.maximum(plans.start_s, 0.0), trainer, inference, np.maximum(plans.infers_s, 0.0))


def _inference_step(cluster: Cluster) -> int:
    """GPUs of a step of inference: a 32nd of the cluster. It is a number of whole engines where it is one at least, so
    that no GPU is idle beside them."""
    return max(1, round(cluster.num_gpus / 32 / cluster.engine_size) * cluster.engine_size)


def _changes(
    num: int, cluster: Cluster, span_s: float, *, infers_ahead: bool
) -> Iterator[tuple[float, float, list[int], list[int]]]:
    """Changes of a plan: of the trainer's and of inference's start in seconds, and by minibatch of their GPUs."""
    none = [0] * num

    def only(at: int, by: int) -> list[int]:
        return [by if here == at else 0 for here in range(num)]

    def onwards(at: int, by: int) -> list[int]:
        return [by if here >= at else 0 for here in range(num)]

    units = [step * cluster.unit_size for step in _steps(cluster)]
    if not cluster.is_open and not cluster.num_trainer_gpus:
        for share in START_STEPS:
            for sign in (-1, 1):
                by_s = sign * share * span_s
                yield by_s, by_s, none, none
                yield by_s, by_s, only(0, sign * units[0]), none
                if infers_ahead:
                    yield by_s, 0.0, none, none
                    yield 0.0, by_s, none, none
    for at in range(num):
        for step in units if at < 3 else units[-2:]:
            for sign in (-1, 1):
                yield 0.0, 0.0, only(at, sign * step), none
    for at in range(min(num, 2)):
        for sign in (-1, 1):
            by = sign * max(cluster.unit_size, _inference_step(cluster))
            yield 0.0, 0.0, only(at, by), only(at, -by)
            if at < num - 1:
                yield 0.0, 0.0, onwards(at, by), onwards(at, -by)


def _steps(cluster: Cluster) -> tuple[int, ...]:
    """Steps of the trainer's copies: one, two and four of sixteen, and the same shares of larger clusters."""
    most = max(1, len(cluster.unit_rates) - 1)
    return tuple(sorted({1, max(1, most // 16), max(1, most // 8), max(1, most // 4)}))
