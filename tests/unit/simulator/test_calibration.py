"""A run that the simulator itself made gives its costs back; what one run cannot tell keeps its default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from services.scheduler.policy.static import StaticPolicy
from simulator.calibration import calibrated, scenario_text
from simulator.costs import Costs, EngineCosts, InferenceCosts, SyncCosts, TrainerCosts
from simulator.happenings import What
from simulator.lengths import LengthSection, draw_lengths
from simulator.model import ModelSection
from simulator.run import simulate
from simulator.scenario import Scenario, load_scenario
from simulator.workload import Workload
from simulator.world import Placement, World
from tests.component_bench import job_config
from tidegate.recorded import Minibatch, RecordedIteration, RecordedRun
from tidegate.types import Layout, MinibatchOrder, Precision, Role

PROMPT_TOKENS = 5
TRUTH = Costs(
    engine=EngineCosts(
        gpus_per_engine=1,
        max_running=32,
        step_floor_s=0.0,
        step_base_s=4e-3,
        step_per_sequence_s=2e-4,
        step_per_kv_token_s=0.0,
        kv_capacity_tokens=2560,
        prefill_tokens_per_s=1e9,
    ),
    trainer=TrainerCosts(fixed_s=0.11, rate_tokens_per_s=5_000.0, rate_gpus=2),
    inference=InferenceCosts(rate_tokens_per_s=7_000.0),
    sync=SyncCosts(fixed_s=0.6),
)


def recorded_run(tmp_path: Path, costs: Costs = TRUTH, *, num_iterations: int = 8) -> RecordedRun:
    """Of a job of 16 groups of 8 on two nodes, whose iterations the simulator made."""
    algorithm = {"prompts_per_iteration": 16, "group_size": 8, "n_minibatches": 4, "iterations": num_iterations}
    config = job_config(tmp_path, algorithm=algorithm)
    has = {role: config.placement(role) for role in Role}
    placement = Placement(
        config.cluster.gpus(), has[Role.ROLLOUT], has[Role.INFERENCE], has[Role.ACTOR], config.actor.layout.layout()
    )
    law = LengthSection(median_tokens=9, sigma_prompt=0.7, sigma_group=0.25, min_tokens=1, max_tokens=64)
    rng = np.random.default_rng(1)
    iterations = []
    for _ in range(num_iterations):
        lengths = draw_lengths(law, num_prompts=16, group_size=8, rng=rng)
        workload = Workload(lengths, 4, PROMPT_TOKENS, MinibatchOrder.FIXED, streams=False)
        iterations.append(iteration_of(World(workload, costs, placement), costs))
    return RecordedRun(config, PROMPT_TOKENS, costs.engine.kv_capacity_tokens, tuple(iterations))


def iteration_of(world: World, costs: Costs) -> RecordedIteration:
    history = list(world.happenings())
    at_s = {what: [each.at_s for each in history if each.what is what] for what in What}
    finished = [each for each in history if each.what is What.MINIBATCH_FINISHED]
    num_tokens = sum(each.count for each in finished)
    lengths = tuple(
        tuple(sequence.generated for sequence in world.rollout.sequences if sequence.group == group)
        for group in range(16)
    )
    return RecordedIteration(
        lengths=lengths,
        seconds=history[-1].at_s,
        generating_s=at_s[What.ROLLOUT_FINISHED][0],
        inferring_s=num_tokens / costs.inference.rate_tokens_per_s,
        minibatches=tuple(
            Minibatch(each.count, each.at_s - began)
            for each, began in zip(finished, at_s[What.MINIBATCH_STARTED], strict=True)
        ),
    )


def fitted(run: RecordedRun) -> dict[str, float]:
    return {each.key: each.value for each in calibrated(run)}


def test_the_costs_of_a_run_that_the_simulator_made_are_found_again(tmp_path: Path) -> None:
    found = fitted(recorded_run(tmp_path))
    assert found["costs.trainer.fixed_s"] == pytest.approx(TRUTH.trainer.fixed_s, rel=0.01)
    assert found["costs.trainer.rate_tokens_per_s"] == pytest.approx(TRUTH.trainer.rate_tokens_per_s, rel=0.01)
    assert found["costs.inference.rate_tokens_per_s"] == pytest.approx(TRUTH.inference.rate_tokens_per_s, rel=0.01)
    # Of the engine's two, a step's seconds are told apart by how many sequences an iteration has running on average.
    step_s = found["costs.engine.step_base_s"] + 16 * found["costs.engine.step_per_sequence_s"]
    assert step_s == pytest.approx(4e-3 + 16 * 2e-4, rel=0.25)
    assert found["costs.sync.fixed_s"] == pytest.approx(TRUTH.sync.fixed_s, rel=0.05)


def test_the_fitted_scenario_takes_as_long_as_the_run(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    (path := tmp_path / "fitted.yaml").write_text(scenario_text(calibrated(run)))
    scenario = load_scenario(path)
    simulated = median(simulate(scenario, StaticPolicy(), seed=seed).iteration_s for seed in range(5))
    assert simulated == pytest.approx(median(each.seconds for each in run.iterations), rel=0.1)


def test_a_scenario_file_says_what_each_value_was_fitted_to(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    text = scenario_text(calibrated(run))
    (path := tmp_path / "fitted.yaml").write_text(text)
    scenario = load_scenario(path)
    assert scenario.costs.engine.max_running == run.config.rollout.max_running_requests
    assert scenario.placement().layout == Layout(dp=2)
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("    fixed_s:"))
    assert lines[at - 1].startswith("    # M: 32 minibatches, median 0.")
    assert scenario.costs.switch == Scenario.model_validate(small(scenario)).costs.switch, "no move was recorded"


def test_the_jobs_model_is_the_scenarios_so_that_a_reshard_costs_what_it_moves(tmp_path: Path) -> None:
    """And changes nothing of what is fitted: nothing moved in the run."""
    run = recorded_run(tmp_path)
    model = ModelSection(num_layers=2, hidden_size=16, tied_embeddings=True, precision=Precision.FP32)
    (path := tmp_path / "fitted.yaml").write_text(scenario_text(calibrated(run, model)))
    scenario = load_scenario(path)
    assert scenario.model == model
    assert [each for each in calibrated(run, model) if not each.key.startswith("model.")] == list(calibrated(run))
    assert load_scenario(path, ["model=null"]).model is None


def small(scenario: Scenario) -> dict[str, object]:
    return {
        "cluster": scenario.cluster.model_dump(),
        "actor_layout": scenario.actor_layout,
        "costs": {"engine": {"gpus_per_engine": 1}},
    }


def test_a_stall_of_one_iteration_moves_no_fit(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    first = run.iterations[0]
    slow = tuple(replace(each, seconds=each.seconds + 3.0) for each in first.minibatches[:1])
    stalled = replace(first, seconds=first.seconds + 3.0, minibatches=(*slow, *first.minibatches[1:]))
    want, found = fitted(run), fitted(replace(run, iterations=(stalled, *run.iterations[1:])))
    for key in ("costs.trainer.fixed_s", "costs.sync.fixed_s", "costs.engine.step_base_s"):
        assert found[key] == pytest.approx(want[key], rel=0.05), key


def test_minibatches_that_take_the_same_whatever_their_tokens_have_no_price_a_token(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    flat = tuple(
        replace(each, minibatches=tuple(Minibatch(part.num_tokens, 0.2) for part in each.minibatches))
        for each in run.iterations
    )
    found = {each.key: each for each in calibrated(replace(run, iterations=flat))}
    assert found["costs.trainer.fixed_s"].value == 0.2
    assert found["costs.trainer.rate_tokens_per_s"].source.endswith("tokens made no difference")
