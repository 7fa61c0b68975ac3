"""Trainer and scorer under a pace: a step lasts as long as modelled, and its result has the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import effort
from tests.integration.inference.scoring import groups
from tests.integration.megatron import small_job
from tests.integration.megatron.paced_ranks import LAW
from tests.ranks import RankServer, Results
from tidegate.megatron.batching import ReplicaPlace, plan_micro_batches
from tidegate.types import Layout

JOBS = "tests.integration.megatron.paced_ranks"


def assert_same_bits(got: Results) -> None:
    paced = {key.removeprefix("paced/"): value for key, value in got.items() if key.startswith("paced/")}
    assert len(paced) > 1
    for key, value in paced.items():
        if key != "seconds":
            assert np.array_equal(value, got[f"unpaced/{key}"]), key


@pytest.mark.parametrize("layout", effort.cases([{"dp": 2}, {"pp": 2}], always=[{"dp": 2}]), ids=["dp2", "pp2"])
def test_an_update_lasts_as_long_as_that_of_the_busiest_replica_with_the_same_bits(
    ranks: RankServer, layout: dict[str, int]
) -> None:
    whole = Layout(**layout)
    plan = plan_micro_batches(
        [len(sample.tokens) for sample in small_job.recorded_samples()],
        small_job.trainer_settings().limits,
        ReplicaPlace(num_replicas=whole.dp),
    )
    want_s = LAW.training_s(plan.replica_tokens(), whole)
    for got in ranks.run(f"{JOBS}:update", whole.num_ranks, {"layout": layout}):
        assert got["paced/seconds"] >= want_s
        assert got["num_steps"] == 1
        assert_same_bits(got)


def test_a_scoring_lasts_as_long_as_that_of_the_busiest_replica_with_the_same_bits(
    ranks: RankServer, tmp_path: Path
) -> None:
    num_tokens = sum(len(sequence) for group in groups() for sequence in group)
    at_least_s = LAW.scoring_s(num_tokens // 2, Layout(dp=2))
    for got in ranks.run(f"{JOBS}:scoring", 2, {"layout": {"dp": 2}, "folder": str(tmp_path)}):
        assert got["paced/seconds"] >= at_least_s
        assert got["num_steps"] == 1
        assert_same_bits(got)
