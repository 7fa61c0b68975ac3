"""The benchmark of a cluster's cost compares the same steps on both sides."""

from __future__ import annotations

from benchmarks.cluster import PARTS, measured


async def test_both_sides_take_all_parts_of_each_step() -> None:
    cases = await measured(3)
    assert [case["case"] for case in cases] == ["open", "credentials"]
    for case in cases:
        assert case["steps"] == 3
        assert min(case[f"{part}_p50_ms"] for part in PARTS) > 0
        assert case["step_p50_ms"] >= max(case[f"{part}_p50_ms"] for part in PARTS)
