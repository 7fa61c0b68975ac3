"""Forecasts of plans that no simulation would carry out. `test_foresight` has those that one does."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.policy.tide.cluster import Plans, cluster_of, gpus_there
from services.scheduler.policy.tide.forecast import DOUBT, Forecast
from services.scheduler.policy.tide.outlook import outlook
from services.scheduler.state.observed import TrainerRate
from services.scheduler.state.remembered import Assignment
from tests.unit.scheduler.situations import COSTS, gpus, job, seen
from tidegate.types import Layout

SPEC = job(actor=4, rollout=10, inference=2, actor_tp=2, rollout_tp=2, prompts=32, group_size=4, minibatches=1)
ALL_GENERATE = Assignment(tuple(gpus(start, start + 2) for start in range(0, 16, 2)), None, ())


def forecast(*, max_overfull: float) -> Forecast:
    """8 engines of 8 slots run 64 sequences; no sequence waits."""
    rates = (TrainerRate(Layout(tp=2, dp=2), 500.0),)
    situation = seen(SPEC, ALL_GENERATE, num_unfinished=64, max_running=8, length=8000, measured=rates)
    cluster = cluster_of(situation, ALL_GENERATE, gpus_there(situation))
    final = np.full(len(situation.generation.lengths), 8000.0)
    return Forecast(outlook(situation, final, num_slots=64), cluster, COSTS, max_overfull)


def plan(*, trainer: int, inference: int) -> Plans:
    return Plans(np.zeros(1), np.array([[trainer]]), np.array([[inference]]))


@pytest.mark.parametrize(("trainer", "inference", "ends"), [(0, 2, False), (4, 0, False), (4, 2, True)])
def test_a_plan_that_leaves_work_without_gpus_never_ends(trainer: int, inference: int, ends: bool) -> None:
    (end_s,), _ = forecast(max_overfull=2.0).ends_s(plan(trainer=trainer, inference=inference))
    assert np.isfinite(end_s) == ends


def test_the_end_of_an_overfull_plan_is_doubted() -> None:
    crowded = plan(trainer=12, inference=2)
    (believed_s,), _ = forecast(max_overfull=8.0).ends_s(crowded)
    (doubted_s,), _ = forecast(max_overfull=7.9).ends_s(crowded)
    assert doubted_s == pytest.approx(DOUBT * believed_s)
