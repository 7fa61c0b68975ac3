"""The benchmark of a cluster's decisions runs with the loop as it is."""

from __future__ import annotations

from benchmarks.cluster_decide import QUICK_ROUNDS, decided


def test_each_round_of_the_benchmark_places_one_job() -> None:
    found = decided(is_quick=True)
    assert found["rounds"] == QUICK_ROUNDS
    assert 0 < found["round_p50_ms"] <= found["round_p99_ms"] <= found["round_max_ms"]
