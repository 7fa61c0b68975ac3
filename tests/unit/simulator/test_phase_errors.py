"""The errors of fitted costs by phase: none for a run from the simulator, and those of a changed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.phase_errors import PhaseError, of_run
from tests.unit.simulator.simulated_recording import recorded_run
from tidegate.recorded import RecordedIteration, RecordedRun


def errors(run: RecordedRun) -> dict[str, float]:
    return {each.phase: each.error_percent for each in of_run(run)}


def slower(iteration: RecordedIteration, factor: float) -> RecordedIteration:
    minibatches = tuple(replace(each, seconds=factor * each.seconds) for each in iteration.minibatches)
    return replace(iteration, minibatches=minibatches)


def test_a_run_from_the_simulator_has_small_errors_in_every_phase(tmp_path: Path) -> None:
    found = errors(recorded_run(tmp_path))
    assert list(found) == ["rollout", "inference", "training", "iteration"]
    assert {phase: pytest.approx(0, abs=10) for phase in found} == found
    assert found["training"] == pytest.approx(0, abs=1)


def test_a_half_is_compared_with_costs_of_the_other_half(tmp_path: Path) -> None:
    """The second of three iterations trains twice as long, so its costs predict twice the time for the others. A fit to
    all three would be near the others."""
    first, second, third, *_ = recorded_run(tmp_path).iterations
    run = replace(recorded_run(tmp_path), iterations=(first, slower(second, 2), third))
    assert errors(run)["training"] == pytest.approx(100, abs=15)


def test_one_iteration_is_compared_with_itself_and_phases_without_time_are_left_out(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, num_iterations=1)
    assert set(errors(run)) == {"rollout", "inference", "training", "iteration"}
    idle = replace(run.iterations[0], minibatches=tuple(replace(m, seconds=0.0) for m in run.iterations[0].minibatches))
    assert "training" not in errors(replace(run, iterations=(idle,)))


def test_the_summary_of_an_error_has_its_sign() -> None:
    assert PhaseError("rollout", 2.0, 2.2).summary() == "rollout: 2.2 s, measured 2 s (+10 %)"
    assert PhaseError("rollout", 2.0, 1.9999).row()["error_percent"] == 0.0
