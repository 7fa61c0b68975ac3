"""In reproducible mode a resized run has the same bits as a run that is never resized."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ranks import RankServer, Results

WALKS = "tests.integration.elastic.trainer_ranks:walks"
RESIZED = [
    {"layout": {"dp": 2}},
    {"layout": {"dp": 2, "pp": 2}},
    {"layout": {"dp": 4}},
    {"layout": {"pp": 2, "vpp": 2}},
]
FIXED = [{"layout": {"dp": 1}}]


def run(ranks: RankServer, places: list[dict[str, Any]], *, updates_between: int) -> Results:
    arguments = {"places": places, "shards": 4, "updates_between": updates_between}
    return ranks.run(WALKS, 4, arguments)[0]


def test_losses_norms_weights_and_moments_of_a_resized_run_equal_the_fixed_run_bit_for_bit(ranks: RankServer) -> None:
    resized = run(ranks, RESIZED, updates_between=1)
    want = run(ranks, FIXED, updates_between=len(RESIZED))

    assert np.array_equal(resized["updates"], want["updates"])
    state = {key for key in want if key.startswith("final/")}
    assert state
    assert [key for key in state if not np.array_equal(resized[key], want[key])] == []
