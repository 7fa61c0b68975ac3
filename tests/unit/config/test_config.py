"""The job's config: what is wrong is said before anything starts."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate.config.checks.job import devices_fault
from tidegate.config.files import load_config
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.types import Layout, Role

VALID: dict[str, Any] = {
    "job": "try",
    "cluster": {
        "nodes": {"n0": 3, "n1": 2},
        "component_placement": {"actor": "0-1", "rollout": "2,3", "inference": 4},
    },
    "model": {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_seq_len": 64,
    },
    "task": {"name": "count"},
    "algorithm": {
        "iterations": 2,
        "prompts_per_iteration": 4,
        "group_size": 2,
        "n_minibatches": 2,
        "max_new_tokens": 16,
    },
    "actor": {"layout": {"dp": 2}, "learning_rate": 1e-3, "warm_up": {"steps": 1}},
}


def _with(path: str, value: object) -> dict[str, Any]:
    raw = copy.deepcopy(VALID)
    section = raw
    *parents, key = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return raw


def test_a_placement_is_counted_over_the_nodes_in_order() -> None:
    config = parse_config(VALID)
    assert config.placement(Role.ROLLOUT) == ("n0/2", "n1/0")
    assert config.placement(Role.INFERENCE) == ("n1/1",)
    assert config.layout(Role.ACTOR) == Layout(dp=2)
    assert config.layout(Role.ROLLOUT) == Layout(dp=2)


def test_a_policy_that_moves_gpus_may_give_each_of_the_jobs_gpus_to_every_component() -> None:
    raw = _with("cluster.nodes", {"n0": 3, "n1": 4}) | {"scheduler": {"policy": "static"}}
    assert parse_config(raw).slots(Role.ROLLOUT) == ("n0/2", "n1/0")
    raw["rollout"] = {"standby": "0,5"}
    assert parse_config(raw).slots(Role.ROLLOUT) == ("n0/0", "n0/2", "n1/0", "n1/2")
    raw["rollout"] = {}
    raw["actor"]["standby"] = "6"
    assert parse_config(raw).slots(Role.ACTOR) == ("n0/0", "n0/1", "n1/3")
    everywhere = ("n0/0", "n0/1", "n0/2", "n1/0", "n1/1", "n1/3")
    assert parse_config(raw).gpus == everywhere
    raw["scheduler"] = {"policy": "tide"}
    assert [parse_config(raw).slots(role) for role in Role] == [everywhere] * 3


def test_the_actor_may_get_standby_gpus_besides_those_of_its_placement() -> None:
    raw = _with("cluster.nodes", {"n0": 3, "n1": 4})
    raw["actor"]["standby"] = "5-6"
    config = parse_config(raw)
    assert config.standby() == ("n1/2", "n1/3")
    assert not [warning for warning in config.warnings() if "to no component" in warning]


def test_json_and_back_is_the_same_config() -> None:
    config = parse_config(VALID)
    assert JobConfig.from_json(config.to_json()) == config


WRONG = {
    "none, where YAML writes null": (
        _with("algorithm.importance_cap", "none"),
        r"^algorithm.importance_cap='none': Input should be a valid number, .*; write null for no value$",
    ),
    "none for a section that may be left out": (
        _with("task", "None"),
        r"^task must hold keys and values such as name:, found 'None'; write null for no value$",
    ),
    "none for a key that needs a value": (
        _with("algorithm.group_size", "none"),
        r"^algorithm.group_size='none': Input should be a valid integer, unable to parse string as an integer$",
    ),
    "an unknown policy names the nearest": (
        _with("scheduler", {"policy": "rlinfs"}),
        r"^scheduler.policy='rlinfs': Input should be 'static', .*; the nearest is 'rlinf'$",
    ),
    "an unknown policy that is near to none names none": (
        _with("scheduler", {"policy": "zzz"}),
        r"^scheduler.policy='zzz': Input should be 'static', [^;]*$",
    ),
    "an unknown rule names the nearest": (
        _with("scheduler", {"dynarl": {"low_for": 2}}),
        r"^unknown key 'scheduler.dynarl.low_for'; the nearest known key is 'low_for_s'",
    ),
    "a share above 1": (
        _with("scheduler", {"dynarl": {"low_kv_use": 1.5}}),
        r"^scheduler.dynarl.low_kv_use=1.5: Input should be less than or equal to 1$",
    ),
    "too few moves to compare": (
        _with("scheduler", {"dynarl": {"released_shares": [0.5]}}),
        r"^scheduler.dynarl.released_shares=\[0.5\]: Tuple should have at least 2 items",
    ),
    "a time that does not pass": (
        _with("scheduler", {"decide_every_s": 0}),
        r"^scheduler.decide_every_s=0: Input should be greater than 0$",
    ),
    "an unknown key names the nearest": (
        _with("algorithm.group_sise", 4),
        r"unknown key 'algorithm.group_sise'; the nearest known key is 'group_size'",
    ),
    "an unknown key that is near to none names none": (
        _with("algorithm.zzz", 4),
        r"^unknown key 'algorithm.zzz' \(known here: clip_high, ",
    ),
    "a value in place of a section": (
        _with("task", "countdown"),
        r"^task must hold keys and values such as name:, found 'countdown'$",
    ),
    "a section left empty": (
        _with("model", None),
        r"^model must hold keys and values such as num_layers:, found nothing$",
    ),
    "a value in place of the nodes": (
        _with("cluster.nodes", 8),
        r"^cluster.nodes must hold keys and values such as n0: 4, found 8$",
    ),
    "a shape that lacks keys": (
        _with("model", {"num_layers": 2, "max_seq_len": 64}),
        r"^model.hidden_size, model.ffn_hidden_size, model.num_heads, model.num_kv_heads, model.head_dim missing: name "
        r"the whole shape, or a checkpoint's folder by model.path$",
    ),
    "a shape beside a checkpoint's": (
        _with("model", {"path": "somewhere", "num_layers": 2, "rope_theta": 1e6, "max_seq_len": 64}),
        r"^model.path sets the shape, and so do model.num_layers, model.rope_theta: leave them out",
    ),
    "an evaluation of no prompts of a task": (
        _with("evaluation", {"every": 2}),
        r"^evaluation.num_prompts is missing: a built-in task's held-out prompts have no end; set it to 64$",
    ),
    "an evaluation of a task on data": (
        _with("evaluation", {"every": 2, "num_prompts": 4, "data": "test.jsonl"}),
        r"^evaluation.data is given, and a built-in task has held-out prompts of its own: remove it$",
    ),
    "pass@k of fewer responses": (
        _with(
            "evaluation", {"every": 2, "num_prompts": 4, "samples_per_prompt": 4, "pass_at": [1, 8], "temperature": 1}
        ),
        r"^evaluation.pass_at=\[1, 8\] needs numbers of 1 to evaluation.samples_per_prompt=4: pass@k",
    ),
    "the same response several times": (
        _with("evaluation", {"every": 2, "num_prompts": 4, "samples_per_prompt": 4}),
        r"^evaluation.samples_per_prompt=4 with evaluation.temperature=0 makes the same response 4 times: set the",
    ),
    "an evaluation's responses longer than a sequence": (
        _with("evaluation", {"every": 2, "num_prompts": 4, "max_new_tokens": 1000}),
        r"^evaluation.max_new_tokens=1000 leaves no token for the prompt: it must be less than model.max_seq_len=",
    ),
    "a missing key is named": (_with("actor", {}), r"key 'actor.learning_rate' is missing"),
    "a layout that does not fit gives the equation and the legal size": (
        _with("actor.layout", {"tp": 2, "dp": 2}),
        r"tp \* pp \* dp \* cp = 2 \* 1 \* 2 \* 1 = 4 ranks, but cluster.component_placement.actor gives 2 GPUs; with "
        r"tp=2 pp=1 cp=1 use dp=1",
    ),
    "virtual stages without a pipeline": (
        _with("actor.layout", {"dp": 2, "vpp": 2}),
        r"^layout vpp=2 with pp=1: Megatron interleaves stages only; set vpp to 1 or pp > 1$",
    ),
    "replicas that do not divide the logical shards": (
        _with("actor", VALID["actor"] | {"num_logical_shards": 1}),
        r"^actor.layout: layout dp2 does not fit: dp=2 does not divide actor.num_logical_shards=1; legal dp: 1$",
    ),
    "a GPU listed twice names both": (
        _with("cluster.component_placement.rollout", "1,2"),
        r"component_placement.rollout names GPU 1, which actor has already",
    ),
    "a GPU listed twice in one role": (
        _with("cluster.component_placement.rollout", "2,2"),
        r"component_placement.rollout names GPU 2, which rollout has already",
    ),
    "a GPU beyond the cluster gives the range": (
        _with("cluster.component_placement.inference", "6"),
        r"names GPU 6, the cluster has 5 \(0-4\)",
    ),
    "GPUs of others and beyond the cluster are one line a component": (
        _with("cluster.component_placement.inference", "0-2,6-9"),
        r"^cluster.component_placement.inference names GPUs 0-1, which actor has already, GPU 2, which rollout has "
        r"already: list each GPU once; GPUs 6-9, the cluster has 5 \(0-4\)$",
    ),
    "a range longer than any cluster": (
        _with("cluster.component_placement.inference", "0-90000000"),
        r"inference: '0-90000000' is not a list of GPUs like '0-3' or '0,2,5', each below 65,536",
    ),
    "a node larger than any cluster": (
        _with("cluster.nodes", {"n0": 4_000_000_000}),
        r"cluster.nodes.n0=4000000000: Input should be less than or equal to 65536",
    ),
    "nodes of more GPUs than any cluster has": (
        _with("cluster.nodes", {"n0": 65_536, "n1": 1}),
        r"^cluster.nodes has 65,537 GPUs on 2 nodes, and a cluster at most 65,536: name fewer nodes, or fewer GPUs of",
    ),
    "a GPU that the rollout may get is in the cluster": (
        _with("rollout.standby", "1,9"),
        r"rollout.standby names GPU 9, the cluster has 5 \(0-4\)",
    ),
    "a GPU that the actor may get is of no other component": (
        _with("actor.standby", "1,4"),
        r"standby names GPU 1, which actor has already, GPU 4, which inference has already: list each GPU once",
    ),
    **{
        f"a rate of the trainer of {rate}": (
            _with("assumptions", {"costs": {"trainer_tokens_per_s": rate}}),
            r"^assumptions.costs.trainer_tokens_per_s=.*: Input should be " + want,
        )
        for rate, want in (
            (1e-323, "greater than or equal to 0.001"),
            (1e308, "less than or equal to 1000000000000000"),
        )
    },
    "a rate of the trainer on more GPUs than any cluster has": (
        _with("assumptions", {"costs": {"trainer_gpus": 10**400}}),
        r"^assumptions.costs.trainer_gpus=.*: Input should be less than or equal to 65536",
    ),
    "logical shards that are no power of two": (
        _with("actor.num_logical_shards", 6),
        "actor.num_logical_shards=6 must be a power of two that every dp of the actor divides",
    ),
    "micro-batches counted in two ways": (
        _with("actor", VALID["actor"] | {"micro_batch_size": 4, "max_tokens_per_microbatch": 512}),
        r"^actor.micro_batch_size=4 counts sequences and max_tokens_per_microbatch=512 tokens: set only one of them",
    ),
    "samples that may be refused once the job runs": (
        _with("actor", VALID["actor"] | {"oversize_samples": "refuse", "max_tokens_per_microbatch": 48}),
        r"^actor.max_tokens_per_microbatch=48 is less than the 64 positions of a sample of model.max_seq_len=64, .*: "
        "raise it to 64, or set",
    ),
    "samples refused over no cap": (
        _with("actor.oversize_samples", "refuse"),
        r"^actor.oversize_samples=refuse concerns samples over actor.max_tokens_per_microbatch: set that too$",
    ),
    "sequences without padding on a CPU": (
        _with("actor", VALID["actor"] | {"packing": "thd", "max_tokens_per_microbatch": 512}),
        "^actor.packing=thd uses the attention of Transformer Engine, which needs CUDA, and cluster.device is cpu: "
        "set packing to padded$",
    ),
    "sequences without padding and without a cap": (
        _with("cluster", VALID["cluster"] | {"device": "cuda"}) | {"actor": VALID["actor"] | {"packing": "thd"}},
        "^actor.packing=thd applies only with actor.max_tokens_per_microbatch: set that too$",
    ),
    "a GPU that the actor may get beyond the cluster": (
        _with("actor.standby", "5"),
        r"actor.standby names GPU 5, the cluster has 5 \(0-4\)",
    ),
    "a placement that is no list": (
        _with("cluster.component_placement.inference", "all"),
        r"'all' is not a list of GPUs",
    ),
    "minibatches that do not divide name the legal ones": (
        _with("algorithm.n_minibatches", 3),
        r"n_minibatches=3 does not divide prompts_per_iteration=4; legal: 1, 2, 4",
    ),
    "extra prompts that replace nothing": (
        _with("algorithm.max_extra_prompts", 8),
        r"max_extra_prompts=8 replaces groups that filter_zero_std drops, and filter_zero_std is false: set it to true",
    ),
    "groups that can have no spread": (
        _with("algorithm", VALID["algorithm"] | {"filter_zero_std": True, "group_size": 1}),
        r"filter_zero_std=true drops every group of group_size=1",
    ),
    "a negative number": (_with("algorithm.group_size", -1), r"algorithm.group_size=-1: .* greater than or equal to 1"),
    "heads that do not divide": (_with("model.num_kv_heads", 3), r"num_heads=4 does not divide by num_kv_heads=3"),
    "responses that leave no room for a prompt": (
        _with("algorithm.max_new_tokens", 64),
        r"max_new_tokens=64 leaves no room for a prompt in model.max_seq_len=64",
    ),
    "a job name that cannot name a stream": (_with("job", "My Job"), r"job name 'My Job' must be"),
    "more requests than an embedded engine takes": (
        _with("rollout.max_running_requests", 5000),
        r"rollout.max_running_requests=5000 is more than an embedded engine .*: lower it to 256 or less",
    ),
    "SGLang without its environment": (
        _with("rollout.engine", "sglang"),
        r"rollout.engine=sglang needs rollout.sglang.python, .*make .venv-sglang",
    ),
    "a server's start that its command does not wait for": (
        _with("rollout", {"engine": "sglang", "sglang": {"python": "bin/python", "start_timeout_s": 120}}),
        r"start_timeout_s=120 is not below runtime.command_deadline_s=120, the deadline .*: lower the first",
    ),
    "an engine that there is not": (
        _with("rollout.engine", "vllm"),
        r"rollout.engine='vllm': .*'embedded' or 'sglang'",
    ),
    "a lead that outlives its lease": (_with("runtime.lead_ttl_s", 60), r"lead_ttl_s=60.0 is longer than lease_ttl_s"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_refused_with_a_remedy(case: str) -> None:
    raw, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


DATA = {"train": "train.jsonl", "answer_key": "answer"}
REWARDS = [{"name": "exact_match"}]


def _on_data(**changes: Any) -> dict[str, Any]:
    raw = copy.deepcopy(VALID)
    raw["model"]["tokenizer"] = "words.json"
    raw["actor"]["warm_up"] = {"steps": 0}
    return {**raw, "task": None, "data": DATA, "rewards": REWARDS, **changes}


def test_a_job_has_a_task_or_data_with_rewards() -> None:
    parse_config(_on_data())
    task = {"name": "count"}
    cases: list[dict[str, Any]] = [
        {"task": task},
        {"data": None, "rewards": []},
        {"rewards": []},
        {"task": task, "data": None},
    ]
    for wrong in cases:
        with pytest.raises(ConfigError, match=r"task|rewards"):
            parse_config(_on_data(**wrong))


def test_only_a_job_on_data_names_evaluation_data() -> None:
    evaluation = {"every": 2, "num_prompts": 4}
    parse_config(_on_data(evaluation={**evaluation, "data": "test.jsonl"}))
    with pytest.raises(ConfigError, match=r"^evaluation.data is empty: name a file"):
        parse_config(_on_data(evaluation=evaluation))
    parse_config(_with("evaluation", evaluation))
    with pytest.raises(ConfigError, match=r"^evaluation.data is given, and a built-in task has held-out prompts"):
        parse_config(_with("evaluation", {**evaluation, "data": "test.jsonl"}))


def test_sglang_may_run_more_requests_than_an_embedded_engine() -> None:
    sglang = {"engine": "sglang", "sglang": {"python": "bin/python"}, "max_running_requests": 1024}
    assert parse_config(_with("rollout", sglang)).rollout.max_running_requests == 1024


def test_all_faults_between_sections_are_reported_at_once() -> None:
    raw = _with("algorithm.n_minibatches", 3)
    raw["cluster"]["component_placement"]["inference"] = "6"
    with pytest.raises(ConfigError, match=r"(?s)GPU 6.*n_minibatches=3"):
        parse_config(raw)


def test_a_top_p_that_biases_the_update_is_a_warning_with_the_remedy() -> None:
    (warning,) = parse_config(_with("algorithm.top_p", 0.9)).warnings()
    assert warning.startswith("algorithm.top_p=0.9: ")
    assert "the update is biased; set it to 1" in warning
    assert parse_config(VALID).warnings() == ()


def test_an_importance_cap_without_effect_is_a_warning() -> None:
    raw = _with("algorithm.importance_cap", 2.0)
    assert parse_config(raw).warnings() == ()
    raw["algorithm"]["old_logprobs"] = "engine"
    (warning,) = parse_config(raw).warnings()
    assert warning.startswith("algorithm.importance_cap=2 corrects nothing with old_logprobs: engine")


def test_a_model_with_random_weights_is_a_warning_with_the_remedy() -> None:
    (warning,) = parse_config(_with("actor.warm_up.steps", 0)).warnings()
    assert warning.startswith("actor.warm_up.steps=0: ")
    assert "learns only where random responses earn some reward" in warning
    assert "set it to 200" in warning


def test_an_engine_that_takes_no_seeds_is_a_warning_that_names_one_that_does() -> None:
    sglang = {"engine": "sglang", "sglang": {"python": "bin/python"}}
    (warning,) = parse_config(_with("rollout", sglang)).warnings()
    assert warning.startswith("rollout.engine=sglang samples without seeds on a CPU")
    assert "set it to embedded" in warning


def test_gpus_that_no_component_uses_are_a_warning() -> None:
    (warning,) = parse_config(_with("cluster.nodes", {"n0": 3, "n1": 4})).warnings()
    assert "leaves 2 of 7 GPUs to no component: 5 (n1/2), 6 (n1/3);" in warning


def test_slots_that_share_a_device_are_a_warning_that_this_is_for_trials() -> None:
    (warning,) = parse_config(_with("cluster.slots_per_gpu", 3)).warnings()
    assert warning.startswith("cluster.slots_per_gpu=3: up to 3 slots share a device and its memory")
    assert warning.endswith("this is for trials, not for speed")
    assert parse_config(_with("cluster.slots_per_gpu", 1)).warnings() == ()


@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_a_device_has_a_whole_number_of_slots_and_at_least_one(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^cluster.slots_per_gpu=.*: Input should be"):
        parse_config(_with("cluster.slots_per_gpu", value))


@pytest.mark.parametrize(
    ("cluster", "num_found", "want"),
    [
        ({"device": "cpu"}, 0, None),
        ({"nodes": {"n0": 8}}, 8, None),
        ({"nodes": {"n0": 8}}, 1, "cluster.nodes: n0 has 8 slots, which with cluster.slots_per_gpu=1 need 8 CUDA"),
        ({"nodes": {"n0": 8}}, 1, "or set cluster.slots_per_gpu=8 for a trial in which slots share a device"),
        ({"nodes": {"n0": 8}}, 3, "and torch finds 3: name fewer slots, or set cluster.slots_per_gpu=3 for a trial"),
        ({"nodes": {"n0": 8}, "slots_per_gpu": 3}, 3, None),
        ({"nodes": {"n0": 8}, "slots_per_gpu": 8}, 1, None),
        ({"nodes": {"n0": 4, "n1": 4}}, 8, "cluster.nodes: n0, n1 are all on this machine and would each take"),
        ({"nodes": {"n0": 8}, "slots_per_gpu": 4}, 1, "with cluster.slots_per_gpu=4 need 2 CUDA devices"),
    ],
    ids=[
        "CPU slots need none",
        "one for each slot",
        "too few",
        "the remedy for one",
        "the remedy for three",
        "the remedy works",
        "all slots on one",
        "two nodes on one machine",
        "slots for two",
    ],
)
def test_a_job_starts_only_on_devices_that_its_slots_fit(
    cluster: dict[str, Any], num_found: int, want: str | None
) -> None:
    raw = copy.deepcopy(VALID)
    raw["cluster"] |= {"device": "cuda"} | cluster
    fault = devices_fault(parse_config(raw).cluster, num_found)
    assert fault == want or (want is not None and fault is not None and want in fault)


def test_the_example_config_has_no_warnings() -> None:
    assert load_config(Path(__file__).resolve().parents[3] / "examples" / "grpo.yaml").warnings() == ()


FILES = {
    "an empty file": ("# nothing yet\n", r"job.yaml is empty: write the keys of a job"),
    "a plain string": ("hello\n", r"job.yaml must hold keys and values such as job:, found 'hello'$"),
    "a key twice at the top": (
        "job: a\nseed: 1\njob: b\n",
        r"key 'job' occurs twice, in lines 1 and 3: keep one$",
    ),
    "a key twice in a section": (
        "job: a\nactor:\n  layout: {tp: 1}\n  learning_rate: 1\n  layout: {tp: 2}\n",
        r"job.yaml: key 'layout' occurs twice, in lines 3 and 5",
    ),
    "a key twice in one line": ("actor: {tp: 1, tp: 2}\n", r"key 'tp' occurs twice, in lines 1 and 1"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_holds_no_config_is_refused_with_its_fault(case: str, tmp_path: Path) -> None:
    text, message = FILES[case]
    (path := tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_key_that_a_merge_brings_may_be_written_again(tmp_path: Path) -> None:
    raw = _with("inference", {"layout": {"dp": 1}})
    text = yaml.safe_dump(raw).replace("learning_rate: 0.001", "<<: {learning_rate: 1.0}\n  learning_rate: 0.001")
    (path := tmp_path / "job.yaml").write_text(text)
    assert load_config(path) == parse_config(raw)


def test_a_config_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: No such file or directory; give the path"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_config_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("job: [unclosed")
    with pytest.raises(ConfigError, match=r"bad.yaml is not YAML: line 1, column 15: [^\n]*; correct it there$"):
        load_config(path)


def test_a_tokenizer_path_is_relative_to_the_configs_folder(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(_with("model.tokenizer", "words.json")))
    assert load_config(path).model.tokenizer == str(tmp_path / "words.json")
    path.write_text(yaml.safe_dump(_with("model", {"path": "../models/small", "max_seq_len": 64})))
    assert load_config(path).model.path == str(tmp_path.parent / "models" / "small")


def test_the_path_of_sglangs_interpreter_is_relative_to_the_configs_folder_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(_with("rollout.sglang", {"python": "bin/python"})))
    assert load_config(path).rollout.sglang.python == str(tmp_path / "bin" / "python")
