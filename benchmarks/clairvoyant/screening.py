"""Screens thousands of schedules by the forecast of `tide`, with known lengths and without a run.

For each order the beginning of the iteration is computed once (`outlook`). Plans (start, GPUs by minibatch) are
searched on it by steepest descent, from coarse families and from random plans. A forecast is within a few percent of
the run, so its best plans are only the beginning of a search by runs. The same order and generator give the same plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.clairvoyant.schedules import Schedule
from services.scheduler.policy.tide.cluster import Cluster, Plans, cluster_of, gpus_there
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.policy.tide.outlook import outlook
from services.scheduler.policy.tide.plans import Found, family, legal, search
from services.scheduler.state.layouts import engine_size, replicas
from services.scheduler.state.remembered import Assignment, Remembered
from simulator.iteration import SimulatedIteration

DRAWN = 128
"""Random plans for an order, besides those of the family. They take half of the forecast's time."""
ROUNDS = 6
LATEST_START, LATEST_FIXED_START = 0.4, 0.8
"""The latest start of a random plan, as a share of the family's median forecast. In a fixed order good plans start
late."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan with its forecast: `end_s` is the time of its last update. `infer_s`: as in a schedule."""

    start_s: float
    trainer: tuple[int, ...]
    inference: tuple[int, ...]
    end_s: float
    infer_s: float | None = None


class Screen:
    """The screening of one iteration that begins with every GPU in the rollout."""

    def __init__(self, simulated: SimulatedIteration) -> None:
        spec = simulated.spec
        gpus = simulated.scenario.cluster.gpus()
        opened = Assignment(replicas(gpus, engine_size(spec)), None, ())
        self._situation = simulated.situations.situation(simulated.world(opened), Remembered())
        self._cluster: Cluster = cluster_of(self._situation, opened, gpus_there(self._situation))
        self._num_minibatches = spec.num_minibatches
        turns = simulated.workload.lengths.turns
        self._lengths = np.array([float(sum(each)) for row in turns for each in row])

    def plan(self, order: tuple[int, ...], rng: np.random.Generator) -> Plan:
        """The best plan for an order of sequences, from the family and from random plans."""
        forecast = self._forecast(order)
        coarse = family(self._cluster, self._num_minibatches, forecast.span_s, infers_ahead=forecast.infers_ahead)
        scale_s = float(np.median(forecast.ends_s(coarse)))
        drawn = self._drawn(scale_s, rng, infers_ahead=forecast.infers_ahead)
        begin = Plans.of(coarse, legal(drawn, self._cluster))
        return _plan(search(forecast, begin, rounds=ROUNDS))

    def near(self, order: tuple[int, ...], schedule: Schedule) -> Plan:
        """The best plan for another order that a search from the plan of a schedule finds."""
        parts = len(schedule.inference) // len(schedule.trainer)
        begin = Plans(
            np.array([schedule.start_s]),
            np.array([schedule.trainer]),
            np.array([schedule.inference[::parts]]),
            infer_s=None if schedule.infer_s is None else np.array([schedule.infer_s]),
        )
        return _plan(search(self._forecast(order), legal(begin, self._cluster), rounds=ROUNDS))

    def _forecast(self, order: tuple[int, ...]) -> Forecast:
        num_slots = max(1, self._cluster.num_engines) * self._cluster.max_running
        waiting = np.array(order, dtype=np.int64)
        left = outlook(self._situation, self._lengths, num_slots=num_slots, waiting=waiting)
        return Forecast(left, self._cluster, self._situation.costs)

    def _drawn(self, scale_s: float, rng: np.random.Generator, *, infers_ahead: bool) -> Plans:
        shape = DRAWN, self._num_minibatches
        num = self._cluster.num_gpus
        start_s = rng.uniform(0.0, (LATEST_FIXED_START if infers_ahead else LATEST_START) * scale_s, DRAWN)
        return Plans(
            start_s,
            np.sort(rng.integers(1, num, shape), axis=1),
            rng.integers(1, max(2, num // 6), shape),
            infer_s=start_s * rng.uniform(0.5, 1.0, DRAWN) if infers_ahead else None,
        )


def _plan(found: Found) -> Plan:
    (start_s,) = found.plan.start_s.tolist()
    (trainer,), (inference,) = found.plan.trainer.tolist(), found.plan.inference.tolist()
    (infer_s,) = found.plan.infers_s.tolist()
    return Plan(start_s, tuple(trainer), tuple(inference), found.end_s, infer_s if infer_s < start_s else None)
