"""A scenario under computed physics: its faults, what its policies are told, and a whole iteration."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.policy.static import StaticPolicy
from simulator.bound import clairvoyant_bound
from simulator.cost_model import Costs
from simulator.iteration import SimulatedIteration
from simulator.job_spec import job_of
from simulator.physics.costs import ComputedCosts
from simulator.run import simulate
from simulator.scenario import Scenario, ScenarioError, load_scenario
from simulator.used_assumptions import used_assumptions
from tidegate.types import Layout, Role

TEXT = """\
cluster:
  nodes: {n0: 8, n1: 8}
  placement: {actor: 0-3, rollout: 4-13, inference: 14-15}
actor_layout: {tp: 2, dp: 2}
physics: {law: roofline, model: Qwen2.5-1.5B, hardware: H100}
algorithm: {prompts_per_iteration: 16, group_size: 4, n_minibatches: 2}
lengths: {median_tokens: 1000, max_tokens: 8000}
"""
PLAIN = "cluster: {nodes: {n0: 8}, placement: {rollout: 0-7}}\n"
LARGE = (
    "physics.model=Qwen2.5-32B",
    "actor_layout={tp: 4, dp: 2}",
    "cluster.placement={actor: 0-7, rollout: 8-13, inference: 14-15}",
    "physics.hardware=H200",
)


def scenario(folder: Path, *overrides: str) -> Scenario:
    path = folder / "scenario.yaml"
    path.write_text(TEXT)
    return load_scenario(path, overrides)


def laws(folder: Path, *overrides: str) -> ComputedCosts:
    found = scenario(folder, *overrides).laws()
    assert isinstance(found, ComputedCosts)
    return found


@pytest.mark.parametrize(
    ("override", "want"),
    [
        (
            "costs.engine.step_base_s=0.01",
            "costs.engine.step_base_s is set, and physics.law=roofline computes it: leave",
        ),
        ("costs.trainer.exponent=0.4", "costs.trainer.exponent is set, and physics.law=roofline computes it: leave it"),
        (
            "model.num_layers=28",
            "model.num_layers and the other keys of model are set, and physics.law=roofline has the",
        ),
        (
            "physics.law=published_fit",
            "physics.model is set, and physics.law=published_fit takes the times of costs: s",
        ),
        (
            "physics.model=Qwen2.5-32B",
            "actor_layout.tp=2, pp=1, dp=2 has no room for the model: layout tp2-dp2 needs 2",
        ),
        (
            "physics.gpu.memory_bytes=1e10",
            "actor_layout.tp=2, pp=1, dp=2 has no room for the model: layout tp2-dp2 nee",
        ),
        (
            "actor_layouts=[{tp: 8, pp: 3}]",
            "actor_layouts.0: layout tp8-pp3 has 24 ranks and the cluster 16 GPUs: lower",
        ),
        (
            "physics.trainer.kernel_efficiency=1.5",
            "physics.trainer.kernel_efficiency=1.5: Input should be less than or",
        ),
        ("physics.decode.weight_bandwidth_share=0", "physics.decode.weight_bandwidth_share=0: Input should be greater"),
        ("physics.gpu.flops_per_s=5", "physics.gpu.flops_per_s=5: Input should be greater than or equal to 1000000"),
        ("physics.decode.host_s=1e9", "physics.decode.host_s=1e+09 is above 1,000,000 seconds: nothing would end"),
        ("noise.step_sigma=11", "noise.step_sigma=11 is above 10: it is a spread of the logarithm"),
        ("noise.step_sigma=-1", "noise.step_sigma=-1: Input should be greater than or equal to 0"),
        ("physics.model=GPT-2", "physics.model='GPT-2': Input should be 'Qwen2.5-1.5B', 'Qwen2.5-7B', 'Qwen2.5-32B'"),
    ],
)
def test_a_wrong_physics_is_refused_before_anything_runs(tmp_path: Path, override: str, want: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(tmp_path, override)
    assert str(caught.value).startswith(want)


def test_a_layout_that_a_policy_may_choose_needs_room_with_some_number_of_copies(tmp_path: Path) -> None:
    small = "physics.gpu.memory_bytes=4e10"
    with pytest.raises(ScenarioError, match=r"actor_layouts\.0 has no room for the model: layout single needs 47\."):
        scenario(tmp_path, small, "actor_layouts=[{tp: 1, dp: 1}]")
    own = scenario(tmp_path, small, "actor_layouts=[{tp: 1}]")
    assert job_of(own, own.read_lengths()).layouts[0] == Layout(dp=2)


def test_experts_and_copies_of_the_inference_must_divide(tmp_path: Path) -> None:
    large = (
        "physics.model=Qwen3-235B-A22B",
        "physics.hardware=H20",
        "cluster={nodes: {n0: 128}, placement: {actor: 0-63, rollout: 64-111, inference: 112-117}}",
        "actor_layout={tp: 4, pp: 2, dp: 8, ep: 8}",
        "costs.engine.gpus_per_engine=8",
    )
    with pytest.raises(ScenarioError, match="inference has 6 GPUs, which make no whole copies of 8"):
        scenario(tmp_path, *large)
    odd = [
        *large,
        "cluster.placement={actor: 0-47, rollout: 64-111, inference: 112-119}",
        "actor_layout={tp: 4, pp: 2, dp: 6, ep: 6}",
    ]
    with pytest.raises(ScenarioError, match="ep=6 does not divide the 128 experts"):
        scenario(tmp_path, *odd)


def test_a_scenario_without_physics_has_computed_times(tmp_path: Path) -> None:
    (path := tmp_path / "plain.yaml").write_text(PLAIN)
    laws = load_scenario(path).laws()
    assert laws == load_scenario(path, ["physics={law: roofline, model: Qwen2.5-7B, hardware: H100}"]).laws()
    assert laws.engine != Costs().engine


def test_a_small_scenario_of_an_earlier_release_is_told_the_law_that_it_had(tmp_path: Path) -> None:
    (path := tmp_path / "old.yaml").write_text(PLAIN.replace("rollout: 0-7", "actor: 0, rollout: 2-5, inference: 6-7"))
    with pytest.raises(ScenarioError, match=r"no room for the model: .*; or set physics\.law=published_fit"):
        load_scenario(path)


def test_a_scenario_of_given_costs_has_those_of_its_file(tmp_path: Path) -> None:
    (path := tmp_path / "old.yaml").write_text(PLAIN)
    old = load_scenario(path, ["physics.law=published_fit"])
    assert old.laws() is old.costs == Costs()
    assert not [each.key for each in used_assumptions(old) if each.key.startswith(("physics", "noise"))]


def test_the_assumptions_are_the_numbers_of_the_physics_and_the_values_of_computed_costs(tmp_path: Path) -> None:
    own = scenario(tmp_path, "costs.switch.release_s=9")
    found = {each.key: each for each in used_assumptions(own)}
    assert found["physics.shape.hidden_size"].value == 1536
    assert found["physics.gpu.flops_per_s"].value == 989e12
    assert found["costs.engine.step_base_s"].value == own.laws().engine.step_base_s
    assert found["costs.engine.step_base_s"].source == "computed by physics.law=roofline"
    assert (found["costs.switch.release_s"].value, found["costs.switch.release_s"].source[:2]) == (9, "P:")
    assert not [key for key in found if key.startswith(("costs.trainer", "model.", "noise."))]
    assert all(each.source for each in found.values())


def test_a_duration_of_a_move_that_the_scenario_sets_counts(tmp_path: Path) -> None:
    assert laws(tmp_path).switch.release_s == 2.0
    assert laws(tmp_path, "costs.switch.release_s=9").switch.release_s == 9
    assert laws(tmp_path, "costs.sync.fixed_s=1").sync.fixed_s == 1


@pytest.mark.parametrize(
    ("model", "least_s", "most_s"),
    [("Qwen2.5-7B", 3.9, 6.0), ("Qwen2.5-32B", 6, 18), ("Qwen3-30B-A3B", 4, 18), ("Qwen3-235B-A22B", 10, 60)],
)
def test_a_sync_takes_what_usual_implementations_take(
    tmp_path: Path, model: str, least_s: float, most_s: float
) -> None:
    own = (
        f"physics.model={model}",
        "cluster={nodes: {n0: 8, n1: 8, n2: 64}, placement: {actor: 0-31, rollout: 32-71, inference: 72-79}}",
        "actor_layout={tp: 4, pp: 2, dp: 4}",
        "costs.engine.gpus_per_engine=8",
        "physics.gpu={memory_bytes: 4e11}",
    )
    assert least_s <= laws(tmp_path, *own).sync.sync_s <= most_s


def test_a_move_of_an_engine_takes_what_dynarl_published(tmp_path: Path) -> None:
    """3.6 s for 7B with TP 2; 4.0 s for 32B with TP 4."""
    for model, num_gpus, want in (("Qwen2.5-7B", 2, 3.6), ("Qwen2.5-32B", 4, 4.0)):
        sizes = (
            "cluster.placement={actor: 0-3, rollout: 4-11, inference: 14-15}",
            f"costs.engine.gpus_per_engine={num_gpus}",
        )
        roomy = "physics.gpu.memory_bytes=4e11"
        switch = laws(tmp_path, f"physics.model={model}", *sizes, roomy).switch
        assert switch.release_s + switch.acquire_s == pytest.approx(want, rel=0.05), model


def test_policies_are_told_the_rates_of_the_law_in_every_layout(tmp_path: Path) -> None:
    own = scenario(tmp_path, "actor_layouts=[{tp: 2, pp: 2}]")
    simulated, trainer = SimulatedIteration(own, 0), laws(tmp_path, "actor_layouts=[{tp: 2, pp: 2}]").trainer
    spec, share = simulated.spec, simulated.workload.response_share
    want = {2 * dp: share / trainer.tokens_s(1.0, Layout(tp=2, dp=dp)) for dp in range(1, 9)}
    assert dict(spec.rates.trainer) == want
    assert dict(spec.rates.by_layout) == {
        Layout(tp=2, pp=2, dp=dp): share / trainer.tokens_s(1.0, Layout(tp=2, pp=2, dp=dp)) for dp in range(1, 5)
    }
    assert spec.costs.update_s == trainer.update_s(Layout(tp=2, dp=2))


def test_a_layout_without_room_is_offered_to_no_policy(tmp_path: Path) -> None:
    """32B at TP 4 needs some copies on H200, and one copy of TP 2 has no room at all."""
    own = scenario(tmp_path, *LARGE, "actor_layouts=[{tp: 8}]")
    spec = job_of(own, own.read_lengths())
    assert (spec.fewest_actor_copies, spec.placement[Role.ACTOR].layout) == (2, Layout(tp=4, dp=2))
    assert min(size for size, _ in spec.rates.trainer) == 8
    assert spec.layouts == (Layout(tp=8), Layout(tp=8, dp=2))


def test_the_costs_know_no_length_of_the_iteration(tmp_path: Path) -> None:
    one, other = scenario(tmp_path, "seed=1"), scenario(tmp_path, "seed=2")
    assert one.read_lengths() != other.read_lengths()
    assert one.laws() == other.laws()


@pytest.mark.parametrize("model", ["Qwen2.5-1.5B", "Qwen3-30B-A3B"])
def test_an_iteration_under_computed_physics_trains_every_sample_above_the_bound(tmp_path: Path, model: str) -> None:
    layout = "actor_layout={tp: 1, dp: 8, ep: 8}" if "-A" in model else "actor_layout={tp: 2, dp: 4}"
    placement = "cluster.placement={actor: 0-7, rollout: 8-13, inference: 14-15}"
    own = scenario(tmp_path, f"physics.model={model}", layout, placement, "physics.hardware=H200")
    run = simulate(own, StaticPolicy(), seed=1)
    assert (run.num_samples, run.num_lost) == (64, 0)
    bound = clairvoyant_bound(own.workload(1), own.laws(), num_gpus=16)
    assert 0.2 * run.iteration_s < bound.bound_s <= run.iteration_s
