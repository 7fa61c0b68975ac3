"""Which plans are worth forecasting, and the search among them: steepest descent from the plan that is remembered.

Every round forecasts all neighbours of the best plan in one go and takes the best of them. A neighbour differs in when
the trainer starts, in one minibatch's GPUs, or in those of one minibatch and all later ones alike; the last is what
makes long plans searchable, where a single minibatch rarely gains anything alone. Where nothing is remembered the
search begins at the best of a coarse family: a start, a first and a last number of trainer GPUs, and geometric steps
between them, because what a trainer gains from its GPUs is a power of them.

Invariants: every plan that is tried is legal: whole data-parallel copies of a layout there is, at least one; inference
has a GPU while groups are left for it; a component never has more than all; the search is the same for the same picture
and stops after `rounds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.tide.cluster import Cluster, Plans
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.state.observed import Ints

START_STEPS = (0.008, 0.024, 0.08)
FAMILY_STARTS = (0.0, 0.06, 0.12, 0.18, 0.24, 0.32)
"""Shares of what the rollout still takes: an iteration of a minute and one of an hour are searched alike."""
FAMILY_FIRST = (0.12, 0.2, 0.3, 0.5)
FAMILY_LAST = (0.6, 0.8, 0.95)
FAMILY_INFERENCE = 0.1
"""GPUs, as shares of all: the trainer's in the first and the last minibatch, inference's."""

LEAST_GAIN_S = 0.05
"""Of a round, or the search ends: a forecast is no better than that."""

SLACK_AFTER, SLACK_WEIGHT = 0.6, 0.15
"""Of a plan's score: what all minibatches but the last end later than this share of the iteration's end counts so much.
While the rollout's tail sets the end, the forecast says that the trainer may start late and be small; lengths are
uncertain, and when the tail is shorter than was thought such a plan ends as late as was thought. Without it 48 GPUs
with 64 prompts of 900 tokens took up to 8 % longer (seeds 0 to 4)."""


@dataclass(frozen=True)
class Found:
    """One plan, the seconds from now until its end, and its score, which is to be low: the end, and what missing slack
    counts (`SLACK_AFTER`)."""

    plan: Plans
    end_s: float
    score_s: float


def best_of(forecast: Forecast, plans: Plans) -> Found:
    """Of those with the lowest score the first."""
    return _first_and_best(forecast, plans)[1]


def search(forecast: Forecast, begin: Plans, *, rounds: int) -> Found:
    """From the best of one or more plans, as long as a round gains anything."""
    earliest_s = earliest_start_s(forecast)
    begin = not_before(begin, earliest_s)
    plan = begin if begin.count == 1 else best_of(forecast, begin).plan
    for _ in range(rounds):
        around = not_before(neighbours(plan, forecast.cluster, forecast.span_s), earliest_s)
        found, better = _first_and_best(forecast, Plans.of(plan, around))
        if not better.score_s < found.score_s - LEAST_GAIN_S:
            return found
        found, plan = better, better.plan
    return found


def _first_and_best(forecast: Forecast, plans: Plans) -> tuple[Found, Found]:
    ends_s, others_s = forecast.ends_s(plans)
    scores_s = ends_s + SLACK_WEIGHT * np.maximum(others_s - SLACK_AFTER * ends_s, 0.0)
    first, best = (Found(plans.row(at), float(ends_s[at]), float(scores_s[at])) for at in (0, int(scores_s.argmin())))
    return first, best


def earliest_start_s(forecast: Forecast) -> float:
    """So that the trainer has its GPUs when the first group has ended."""
    return max(0.0, forecast.first_s - forecast.costs.release_s - forecast.costs.load_s)


def not_before(plans: Plans, earliest_s: float) -> Plans:
    """A trainer that has GPUs before it has a group only waits."""
    return replace(plans, start_s=np.maximum(plans.start_s, earliest_s))


def family(cluster: Cluster, num_minibatches: int, span_s: float) -> Plans:
    """The coarse one; with a trainer that is begun they have one start, and to move nothing any more is one of them.
    `span_s`: what the rollout still takes."""
    starts = (0.0,) if cluster.is_open or cluster.num_trainer_gpus else FAMILY_STARTS
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
    return legal(plans, cluster)


def neighbours(plan: Plans, cluster: Cluster, span_s: float) -> Plans:
    """Of one plan; itself is left out. `span_s`: what the rollout still takes."""
    changes = list(_changes(plan.trainer.shape[1], cluster, span_s))
    start = plan.start_s + np.array([change[0] for change in changes])
    trainer = plan.trainer + np.array([change[1] for change in changes], dtype=np.int64)
    inference = plan.inference + np.array([change[2] for change in changes], dtype=np.int64)
    around = legal(Plans(start, trainer, inference, plan.waits), cluster)
    same = (around.start_s == plan.start_s) & (around.trainer == plan.trainer).all(axis=1)
    different = ~(same & (around.inference == plan.inference).all(axis=1))
    return Plans(around.start_s[different], around.trainer[different], around.inference[different], plan.waits)


def legal(plans: Plans, cluster: Cluster) -> Plans:
    """Each brought to the nearest that is."""
    fewest = max(1, int(np.argmax(cluster.unit_rates > 0)))
    least = min(1, cluster.num_gpus - fewest * cluster.unit_size)
    most = max(fewest, (cluster.num_gpus - least) // cluster.unit_size)
    trainer = np.clip(plans.trainer // cluster.unit_size, fewest, most) * cluster.unit_size
    inference = np.clip(plans.inference, least, np.maximum(cluster.num_gpus - trainer, least))
    return Plans(np.maximum(plans.start_s, 0.0), trainer, inference, plans.waits)


def _inference_step(cluster: Cluster) -> int:
    """A thirty-second of the cluster, in whole engines where that is one at least, so that no GPU is left beside
    them."""
    return max(1, round(cluster.num_gpus / 32 / cluster.engine_size) * cluster.engine_size)


def _changes(num: int, cluster: Cluster, span_s: float) -> Iterator[tuple[float, Ints, Ints]]:
    """Of the start, and by minibatch of the trainer's and inference's GPUs."""
    none, here = np.zeros(num, dtype=np.int64), np.arange(num)
    units = [step * cluster.unit_size for step in _steps(cluster)]
    if not cluster.is_open and not cluster.num_trainer_gpus:
        for share in START_STEPS:
            for sign in (-1, 1):
                yield sign * share * span_s, none, none
                yield sign * share * span_s, np.where(here == 0, sign * units[0], 0), none
    for at in range(num):
        for step in units if at < 3 else units[-2:]:
            for sign in (-1, 1):
                yield 0.0, np.where(here == at, sign * step, 0), none
                if at < num - 1:
                    yield 0.0, np.where(here >= at, sign * step, 0), none
        for times in (1, 3) if at < 2 else (1,):
            for sign in (-1, 1):
                yield 0.0, none, np.where(here == at, sign * times * _inference_step(cluster), 0)
    for sign in (-1, 1):
        yield 0.0, none, none + sign * _inference_step(cluster)


def _steps(cluster: Cluster) -> tuple[int, ...]:
    """In units: one, two and four of sixteen, and as many of larger clusters."""
    most = max(1, len(cluster.unit_rates) - 1)
    return tuple(sorted({1, max(1, most // 16), max(1, most // 8), max(1, most // 4)}))
