"""The speed of each number of the trainer's copies, and a trainer that lends its GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.policy.tide.cluster import cluster_of, gpus_there
from services.scheduler.policy.tide.plans import family
from services.scheduler.state.remembered import Assignment, as_configured
from tests.unit.scheduler.situations import job, seen
from tidegate.types import MinibatchOrder

SPEC = job(actor=4, rollout=10, inference=2, prompts=32, group_size=4, minibatches=4)


def test_rates_never_fall_where_a_larger_layout_does_not_exist() -> None:
    reproducible = replace(SPEC, num_logical_shards=8)
    situation = seen(reproducible, as_configured(reproducible))
    rates = cluster_of(situation, as_configured(reproducible), gpus_there(situation)).unit_rates
    assert len(rates) == 17
    assert np.all(np.diff(rates) >= 0)
    assert rates[4] == rates[7] < rates[8] == rates[16], "1, 2, 4 and 8 copies divide 8 shards"


@pytest.mark.parametrize("order", MinibatchOrder)
def test_a_trainer_that_lends_its_gpus_has_none_and_may_start_when_the_rollout_ends(order: MinibatchOrder) -> None:
    spec = replace(SPEC, minibatch_order=order)
    situation = seen(spec, as_configured(spec))
    assert situation.trainer.num_gpus == 4
    cluster = cluster_of(situation, Assignment(as_configured(spec).engines, None, ()), gpus_there(situation))
    assert cluster.num_trainer_gpus == 0
    assert family(cluster, 4, 100.0).start_s.max() == 100.0
