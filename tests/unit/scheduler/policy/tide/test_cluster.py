"""The speed of each number of the trainer's copies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.scheduler.policy.tide.cluster import cluster_of, gpus_there
from services.scheduler.state.remembered import as_configured
from tests.unit.scheduler.situations import job, seen

SPEC = job(actor=4, rollout=10, inference=2, prompts=32, group_size=4, minibatches=4)


def test_rates_never_fall_where_a_larger_layout_does_not_exist() -> None:
    reproducible = replace(SPEC, num_logical_shards=8)
    situation = seen(reproducible, as_configured(reproducible))
    rates = cluster_of(situation, as_configured(reproducible), gpus_there(situation)).unit_rates
    assert len(rates) == 17
    assert np.all(np.diff(rates) >= 0)
    assert rates[4] == rates[7] < rates[8] == rates[16], "1, 2, 4 and 8 copies divide 8 shards"
