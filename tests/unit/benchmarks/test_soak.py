"""The figures of a soak: late iterations over early ones, each kind by its own rule."""

from __future__ import annotations

import pytest

from benchmarks.soak import Look, Sizes, figures, memory_cases

SIZES = Sizes(iterations=100, early=20, window=10)


def a_look(iteration: int, *, growth: float, slower: float = 1.0) -> Look:
    """Rates and sizes that are `growth` times as large from iteration 50 on, on a machine `slower` than before."""
    late = max(0, iteration - 50) * (growth - 1)
    is_late = iteration > 50
    return Look(
        iteration=iteration,
        rss_bytes={"scheduler": int(1e6 * (growth if is_late else 1)), "nats": 1_000_000},
        scheduler_cpu_s=0.1 * (iteration + late + max(0, iteration - 50) * (slower - 1)),
        loop_s=0.002 * (slower if is_late else 1),
        store_bytes=round(1000 * (iteration + late)),
        stream_bytes=int(1e6 * (growth if is_late else 1)),
        folder_bytes=5000 * iteration,
    )


@pytest.mark.parametrize("growth", [1.0, 3.0])
def test_what_grows_is_told_by_its_ratio(growth: float) -> None:
    found = figures([a_look(k, growth=growth) for k in range(SIZES.iterations)], SIZES)
    assert found["decide_growth"] == pytest.approx(growth)
    assert found["store_write_growth"] == pytest.approx(growth)
    assert found["stream_growth"] == pytest.approx(growth)
    assert found["rss_growth"] == pytest.approx((growth + 1) / 2)
    assert found["record_kb_an_iteration"] == pytest.approx(5)


def test_iterations_that_nobody_saw_change_no_rate() -> None:
    looks = [a_look(k, growth=1.0) for k in range(SIZES.iterations) if k % 3]
    assert figures(looks, SIZES)["decide_growth"] == pytest.approx(1.0)


def test_a_machine_that_is_slower_later_is_no_growth() -> None:
    looks = [a_look(k, growth=1.0, slower=1.4) for k in range(SIZES.iterations)]
    assert figures(looks, SIZES)["decide_growth"] == pytest.approx(1.0)


def test_the_memory_of_each_kind_of_process_is_told() -> None:
    looks = [a_look(k, growth=2.0) for k in range(SIZES.iterations)]
    assert memory_cases(looks, SIZES) == [
        {"process": "nats", "early_mb": 1.0, "late_mb": 1.0},
        {"process": "scheduler", "early_mb": 1.0, "late_mb": 2.0},
    ]
