"""The legal contents of a scenario file, and the message for each fault before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.faults import EngineFault, GpuFault, LateFault, NodeFault
from simulator.happenings import What
from simulator.scenario import ScenarioError, load_scenario
from simulator.used_assumptions import used_assumptions
from tidegate.megatron.batching import BatchLimits, Limits
from tidegate.megatron.packing import TokenCap
from tidegate.types import GpuId, Layout, NodeId

GOOD = """\
cluster:
  nodes: {n0: 4, n1: 4}
  placement:
    actor: 0-1
    rollout: 2-5
    inference: 6
algorithm: {prompts_per_iteration: 4, group_size: 2, n_minibatches: 2}
physics: {law: published_fit}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text)
    return path


def test_a_scenario_gives_a_placement_and_a_workload(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path, GOOD), ["lengths.median_tokens=50", "seed=7"])
    placement = scenario.placement()
    assert placement.actor == ("n0/0", "n0/1")
    assert placement.layout == Layout(dp=2)
    assert placement.rollout == ("n0/2", "n0/3", "n1/0", "n1/1")
    assert scenario.workload() == scenario.workload(seed=7)
    assert scenario.workload().num_groups == 4


def test_faults_are_scheduled_as_written(tmp_path: Path) -> None:
    text = GOOD + (
        "faults:\n- {at_s: 1, kind: gpu, gpu: 4}\n- {at_s: 2, kind: engine, engine: 0}\n"
        "- {at_s: 2, kind: node, node: n1, back_after_s: 3}\n"
        "- {at_s: 3, kind: late, what: gpus_freed, late_s: 9}\n"
    )
    want = (
        GpuFault(1, GpuId("n1/0")),
        EngineFault(2, 0),
        NodeFault(2, NodeId("n1"), 3),
        LateFault(3, What.GPUS_FREED, 9),
    )
    assert load_scenario(written(tmp_path, text)).scheduled_faults() == want


@pytest.mark.parametrize(
    ("override", "want"),
    [
        ("costs.engine.max_runing=3", "unknown key 'costs.engine.max_runing'; the nearest known key is 'max_running'"),
        ("costs.switch.release_s=-1", "costs.switch.release_s=-1"),
        ("lengths.environment_s=-2", "lengths.environment_s=-2"),
        ("cluster.placement.inference=5", "cluster.placement.inference names GPU 5, which rollout has already"),
        ("cluster.placement.inference=8", "cluster.placement.inference names GPU 8, the cluster has 8 (0-7)"),
        ("cluster.placement.rollout=2-4", "cluster.placement.rollout has 3 GPUs, which make no whole engines"),
        ("cluster.placement.rollout=x", "cluster.placement.rollout: 'x' is not a list of GPUs"),
        (
            "algorithm.prompts_per_iteration=100000000",
            "algorithm.prompts_per_iteration=100000000 of group_size=2 are 200,000,000 responses, and at most 1,000",
        ),
        ("costs.engine.step_base_s=1e300", "costs.engine.step_base_s=1e+300 is above 1,000,000 seconds: nothing would"),
        ("lengths.environment_s=1e7", "lengths.environment_s=1e+07 is above 1,000,000 seconds: nothing would end"),
        ("costs.trainer.rate_tokens_per_s=1e-300", "costs.trainer.rate_tokens_per_s=1e-300 is below 0.001 a second"),
        ("lengths.sigma_prompt=1000", "lengths.sigma_prompt=1000 is above 10: it is a spread of the logarithm, 1 is"),
        ("lengths.max_tokens=1000000000000", "lengths.max_tokens=1e+12 is above 10,000,000 tokens: lower it"),
        ("lengths.hint_sigma=11", "lengths.hint_sigma=11 is above 10"),
        ("actor_layout.tp=4", "actor_layout.tp=4, pp=1, dp=1, cp=1 needs 4 GPUs and cluster.placement.actor has 2"),
        (
            "actor_num_logical_shards=6",
            "actor_num_logical_shards=6 must be a power of two that every dp of the actor divides, and its dp is 2",
        ),
        ("actor_num_logical_shards=1", "actor_num_logical_shards=1 must be a power of two that every dp of the actor"),
        ("algorithm.n_minibatches=9", "algorithm.n_minibatches=9 is more than the groups of an iteration"),
        ("lengths.law=trace", "lengths.law=trace and lengths.file=''"),
        ("faults=[{at_s: 1, kind: gpu, gpu: 8}]", "faults.0.gpu=8 is outside the cluster, which has 8 GPUs"),
        ("faults=[{at_s: 1, kind: node}]", "faults.0.kind=node needs faults.0.node"),
        ("faults=[{at_s: 1, kind: node, node: n2}]", "faults.0.node=n2 is no node of the cluster, which has n0, n1"),
        ("faults=[{at_s: 1, kind: node, node: n0}]", "faults.0.node=n0 has the components' leads"),
        (
            "faults=[{at_s: 4, kind: node, node: n1}, {at_s: 1, kind: node, node: n1, back_after_s: 3}]",
            "faults.0.at_s=4 loses n1, which faults.1 has lost from 1 s to 4 s: make one fault of the two, or lose",
        ),
        (
            "faults=[{at_s: 1, kind: node, node: n1}, {at_s: 9, kind: node, node: n1, back_after_s: 3}]",
            "faults.1.at_s=9 loses n1, which faults.0 has lost from 1 s on for good: make one fault of the two",
        ),
        ("faults=[{at_s: 1, kind: late}]", "faults.0.kind=late needs faults.0.what"),
        ("faults=[{at_s: -1, kind: engine, engine: 0}]", "faults.0.at_s=-1"),
    ],
)
def test_a_wrong_scenario_is_refused_with_the_key_and_its_origin(tmp_path: Path, override: str, want: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(tmp_path, GOOD), [override])
    assert str(caught.value).startswith(want)
    assert "override" in str(caught.value)


def test_a_scenario_has_the_limits_of_the_actors_micro_batches(tmp_path: Path) -> None:
    def limits(*overrides: str) -> Limits | None:
        return load_scenario(written(tmp_path, GOOD), overrides).workload().limits

    assert limits() is None
    assert limits("algorithm.micro_batches.max_sequences=4") == BatchLimits(max_sequences=4)
    assert limits("algorithm.micro_batches.max_tokens=256") == TokenCap(256)
    costs = ("algorithm.micro_batches.max_tokens=256", "algorithm.micro_batches.token_cost=300")
    assert limits(*costs) == TokenCap(256, 300, 256 * 300)
    with pytest.raises(ScenarioError, match=r"needs one of max_tokens and max_sequences"):
        limits("algorithm.micro_batches.max_sequences=4", "algorithm.micro_batches.max_tokens=256")


def test_a_model_that_the_actors_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "actor_layout: {tp: 2}\nmodel: {num_heads: 27, num_kv_heads: 3}\n")
    with pytest.raises(ScenarioError, match=r"actor_layout\.tp=2, pp=1 cannot hold the model: 3 key/value .*:9"):
        load_scenario(path)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("actor_layouts: [{tp: 4, dp: 3}]", r"actor_layouts\.0: layout tp4-dp3 has 12 ranks and the cluster 8 GPUs"),
        (
            "actor_layouts: [{}, {tp: 2}]\nactor_num_logical_shards: 2",
            r"actor_layouts\.1: tp=2 cp=1 is not the tp=1 cp=1",
        ),
        ("actor_layouts: [{dp: 5}]", r"actor_layouts\.0: no dp of layout dp5 shares a minibatch of 4 / 2 prompts"),
        (
            "actor_layouts: [{tp: 2}]\nmodel: {num_heads: 27, num_kv_heads: 3}",
            r"actor_layouts\.0\.tp=2, pp=1 cannot hold the model: 3 key/value",
        ),
    ],
)
def test_a_layout_that_no_policy_could_choose_is_refused(tmp_path: Path, text: str, want: str) -> None:
    with pytest.raises(ScenarioError, match=want):
        load_scenario(written(tmp_path, GOOD + text + "\n"))


def test_the_assumptions_include_a_model_only_if_the_scenario_has_one(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert not [each for each in used_assumptions(load_scenario(path)) if each.key.startswith("model.")]
    named = {each.key: each for each in used_assumptions(load_scenario(path, ["model.hidden_size=1024"]))}
    assert (named["model.hidden_size"].value, named["model.hidden_size"].default) == (1024, 3584)
    assert all(each.source for each in named.values())


def test_the_assumptions_include_only_those_that_the_scenario_uses(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    (tmp_path / "lengths.txt").write_text("1 2\n" * 4)
    switch, lengths = "costs.switch", "lengths"
    planned = {f"{switch}.reshard_setup_s", f"{switch}.communicators_s", f"{switch}.reshard_bytes_per_s"}
    deaths = {f"{switch}.trainer_cold_s", f"{switch}.engine_cold_s", f"{switch}.detect_s"}
    tail, drawn = (
        {f"{lengths}.tail_share", f"{lengths}.tail_index"},
        {f"{lengths}.median_tokens", f"{lengths}.min_tokens"},
    )
    cases: dict[str, tuple[str, set[str], set[str]]] = {
        "one figure a reshard": ("seed=0", {f"{switch}.reshard_s"}, planned),
        "a model": ("model.num_layers=2", planned, {f"{switch}.reshard_s"}),
        "nothing dies": ("seed=0", drawn, deaths | tail | {"costs.engine.turn_prefill_share"}),
        "an engine dies": ("faults=[{at_s: 1, kind: engine, engine: 0}]", deaths, tail),
        "a tail": ("lengths.law=long_tailed", tail | drawn, set()),
        "a trace": (f"lengths={{law: trace, file: {tmp_path}/lengths.txt}}", {"lengths.hint_sigma"}, tail | drawn),
        "turns": ("lengths.mean_turns=2", {"costs.engine.turn_prefill_share"}, set()),
        "weights": ("costs.sync.weight_bytes=9", {"costs.sync.bytes_per_s"}, set()),
    }
    for name, (override, used, unused) in cases.items():
        found = {each.key for each in used_assumptions(load_scenario(path, [override]))}
        assert used <= found, name
        assert not unused & found, name


def test_a_scenario_that_is_not_yaml_is_refused_in_one_line_with_the_place(tmp_path: Path) -> None:
    path = written(tmp_path, "name: x\n  seed: 3\n")
    with pytest.raises(ScenarioError, match=rf"{path} is not YAML: line 2, column 7: [^\n]*; correct it there$"):
        load_scenario(path)


def test_a_fault_in_a_scenario_file_names_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "sed: 1\n")
    with pytest.raises(ScenarioError, match=f"nearest known key is 'seed'.*{path}:9"):
        load_scenario(path)


def test_a_bad_line_of_the_lengths_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("1 2\n3 4\n5 six\n7 8\n")
    path = written(tmp_path, GOOD + "lengths: {law: trace, file: lengths.txt}\n")
    with pytest.raises(ScenarioError, match=r"lengths\.txt:3: 'six' is no response"):
        load_scenario(path)


def test_a_lengths_file_of_another_number_of_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("1 2\n")
    path = written(tmp_path, GOOD + "lengths: {law: trace, file: lengths.txt}\n")
    with pytest.raises(ScenarioError, match=r"has 1 prompts and algorithm\.prompts_per_iteration=4"):
        load_scenario(path)


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [\n"])
def test_a_file_that_is_no_scenario_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ScenarioError, match=r"scenario\.yaml"):
        load_scenario(written(tmp_path, text))


def test_a_scenario_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="No such file"):
        load_scenario(tmp_path / "none.yaml")
