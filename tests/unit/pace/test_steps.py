"""The steps of a run, as its spans count them, and the run that is void."""

from __future__ import annotations

from tidegate.pace.steps import PacedSteps, paced_steps


def test_counts_of_all_spans_add_up() -> None:
    works = [{"paced_steps": 3, "late_steps": 1, "cpu_us": 500_000}, {"paced_steps": 4, "cpu_us": 1_500_000}]
    assert paced_steps(works, wall_s=4.0) == PacedSteps(num_steps=7, num_late=1, num_cores=0.5)


def test_spans_without_counts_change_nothing() -> None:
    assert paced_steps([{}, {"iteration": 3, "tokens": 7}], wall_s=1.0) == PacedSteps(0, 0, 0.0)


def test_a_run_is_void_from_the_first_step_above_the_share() -> None:
    assert not PacedSteps(1000, 10, 0.5).is_void
    assert PacedSteps(1000, 11, 0.5).is_void
    assert not PacedSteps(0, 0, 0.0).is_void


def test_a_void_run_says_so_with_its_numbers_and_the_remedy() -> None:
    text = PacedSteps(4000, 120, 0.91).text()
    assert text.startswith("VOID: 120 of 4,000 modelled steps (3.00%)")
    assert "raise cluster.pace.time_scale" in text
    assert PacedSteps(4000, 3, 0.91).text() == (
        "paced: 3 of 4,000 modelled steps (0.07%) took over 10% longer than modelled, on 0.91 cores"
    )


def test_the_record_is_read_back() -> None:
    steps = PacedSteps(4000, 120, 0.91)
    assert steps.record() == {"num_steps": 4000, "num_late": 120, "num_cores": 0.91, "is_void": True}
    assert PacedSteps.read(steps.record()) == steps
