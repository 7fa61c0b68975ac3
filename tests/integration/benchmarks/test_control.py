"""The benchmark of the scheduler's control runs through, on the real scheduler, NATS, Redis and gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.control_events import Sizes, measured

PROGRESS_PER_S = 100.0


@pytest.mark.parametrize(
    ("progress_per_s", "works_s"), [(0.0, 0.0), (PROGRESS_PER_S, 0.02)], ids=["back to back", "busy"]
)
async def test_every_command_of_iterations_and_resizes_is_timed_once(
    progress_per_s: float, works_s: float, tmp_path: Path
) -> None:
    sizes = Sizes(iterations=3, resizes=2)
    case = await measured("control", tmp_path, sizes, progress_per_s=progress_per_s, works_s=works_s)
    counts = {command: found["num_commands"] for command, found in case["commands"].items()}
    # The cycle before the first counted one is under way when counting begins.
    assert counts["CloseIteration"] == 3 * sizes.iterations
    assert 2 * sizes.iterations <= counts["LoadWeights"] <= 2 * (sizes.iterations + 1)
    assert 3 * sizes.iterations <= counts["OpenIteration"] <= 3 * (sizes.iterations + 1)
    assert counts["ScaleDown"] == counts["ScaleUp"] == sizes.resizes / 2
    assert (case["progress_per_s"] > 0) == bool(progress_per_s)
    assert 0 < case["p50_ms"] <= case["p99_ms"] <= case["max_ms"]
