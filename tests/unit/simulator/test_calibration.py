"""A calibration on a run from the simulator finds its costs. A value that one run cannot show keeps its default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from services.scheduler.policy.static import StaticPolicy
from simulator.calibration import fitted_values, scenario_text
from simulator.model import ModelSection
from simulator.run import simulate
from simulator.scenario import Scenario, load_scenario
from tests.unit.simulator.simulated_recording import TRUTH, recorded_run
from tidegate.config.sections.job import AllowedLayoutSection
from tidegate.recorded import Minibatch, RecordedRun
from tidegate.types import Layout, Precision


def fitted(run: RecordedRun) -> dict[str, float]:
    return {each.key: each.value for each in fitted_values(run)}


def test_a_calibration_finds_the_costs_of_a_simulated_run(tmp_path: Path) -> None:
    found = fitted(recorded_run(tmp_path))
    assert found["costs.trainer.fixed_s"] == pytest.approx(TRUTH.trainer.fixed_s, rel=0.01)
    assert found["costs.trainer.rate_tokens_per_s"] == pytest.approx(TRUTH.trainer.rate_tokens_per_s, rel=0.01)
    assert found["costs.inference.rate_tokens_per_s"] == pytest.approx(TRUTH.inference.rate_tokens_per_s, rel=0.01)
    # The number of running sequences varies little between iterations, so only the sum of both parts is compared.
    step_s = found["costs.engine.step_base_s"] + 16 * found["costs.engine.step_per_sequence_s"]
    assert step_s == pytest.approx(4e-3 + 16 * 2e-4, rel=0.25)
    assert found["costs.sync.fixed_s"] == pytest.approx(TRUTH.sync.fixed_s, rel=0.05)


def test_the_fitted_scenario_takes_as_long_as_the_run(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    (path := tmp_path / "fitted.yaml").write_text(scenario_text(fitted_values(run)))
    scenario = load_scenario(path)
    simulated = median(simulate(scenario, StaticPolicy(), seed=seed).iteration_s for seed in range(5))
    assert simulated == pytest.approx(median(each.seconds for each in run.iterations), rel=0.1)


def test_a_scenario_file_has_the_source_of_each_fitted_value_and_other_values_keep_their_defaults(
    tmp_path: Path,
) -> None:
    run = recorded_run(tmp_path)
    text = scenario_text(fitted_values(run))
    (path := tmp_path / "fitted.yaml").write_text(text)
    scenario = load_scenario(path)
    assert scenario.costs.engine.max_running == run.config.rollout.max_running_requests
    assert scenario.placement().layout == Layout(dp=2)
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("    fixed_s:"))
    assert lines[at - 1].startswith("    # M: 32 minibatches, median 0.")
    assert scenario.costs.switch == Scenario.model_validate(small(scenario)).costs.switch, "no move was recorded"


def test_the_same_run_gives_the_same_scenario(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    assert scenario_text(fitted_values(run)) == scenario_text(fitted_values(run))


def test_the_scenario_has_the_jobs_model_and_the_same_fitted_values(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    model = ModelSection(num_layers=2, hidden_size=16, tied_embeddings=True, precision=Precision.FP32)
    (path := tmp_path / "fitted.yaml").write_text(scenario_text(fitted_values(run, model)))
    scenario = load_scenario(path)
    assert scenario.model == model
    assert [each for each in fitted_values(run, model) if not each.key.startswith("model.")] == list(fitted_values(run))
    assert load_scenario(path, ["model=null"]).model is None


def test_the_scenario_has_the_layouts_that_a_policy_of_the_job_may_choose(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    allowed = (AllowedLayoutSection(pp=2), AllowedLayoutSection(tp=2, dp=1))
    actor = run.config.actor.model_copy(update={"layouts": allowed})
    run = replace(run, config=run.config.model_copy(update={"actor": actor}))
    text = scenario_text(fitted_values(run))
    assert "actor_layouts: [{pp: 2}, {tp: 2, dp: 1}]\n" in text
    (path := tmp_path / "fitted.yaml").write_text(text)
    assert load_scenario(path).actor_layouts == allowed


def small(scenario: Scenario) -> dict[str, object]:
    return {
        "physics": scenario.physics,
        "cluster": scenario.cluster.model_dump(),
        "actor_layout": scenario.actor_layout,
        "costs": {"engine": {"gpus_per_engine": 1}},
    }


def test_a_stall_of_one_iteration_changes_no_fitted_value(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    first = run.iterations[0]
    slow = tuple(replace(each, seconds=each.seconds + 3.0) for each in first.minibatches[:1])
    stalled = replace(first, seconds=first.seconds + 3.0, minibatches=(*slow, *first.minibatches[1:]))
    want, found = fitted(run), fitted(replace(run, iterations=(stalled, *run.iterations[1:])))
    for key in ("costs.trainer.fixed_s", "costs.sync.fixed_s", "costs.engine.step_base_s"):
        assert found[key] == pytest.approx(want[key], rel=0.05), key


def test_minibatches_of_equal_time_have_no_cost_per_token(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    flat = tuple(
        replace(each, minibatches=tuple(Minibatch(part.num_tokens, 0.2) for part in each.minibatches))
        for each in run.iterations
    )
    found = {each.key: each for each in fitted_values(replace(run, iterations=flat))}
    assert found["costs.trainer.fixed_s"].value == 0.2
    assert found["costs.trainer.rate_tokens_per_s"].source.endswith("tokens made no difference")
