"""What is wrong in a job's config is said, with a remedy, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.valid_config import VALID, on_data, valid_with
from tidegate.config.job_config import ConfigError, parse_config

WRONG = {
    "none, where YAML writes null": (
        valid_with("algorithm.importance_cap", "none"),
        r"^algorithm.importance_cap='none': Input should be a valid number, .*; write null for no value$",
    ),
    "none for a section that may be left out": (
        valid_with("task", "None"),
        r"^task must hold keys and values such as name:, found 'None'; write null for no value$",
    ),
    "none for a key that needs a value": (
        valid_with("algorithm.group_size", "none"),
        r"^algorithm.group_size='none': Input should be a valid integer, unable to parse string as an integer$",
    ),
    "an unknown policy names the nearest": (
        valid_with("scheduler", {"policy": "rlinfs"}),
        r"^scheduler.policy='rlinfs': Input should be 'static', .*; the nearest is 'rlinf'$",
    ),
    "an unknown policy that is near to none names none": (
        valid_with("scheduler", {"policy": "zzz"}),
        r"^scheduler.policy='zzz': Input should be 'static', [^;]*$",
    ),
    "an unknown rule names the nearest": (
        valid_with("scheduler", {"dynarl": {"low_for": 2}}),
        r"^unknown key 'scheduler.dynarl.low_for'; the nearest known key is 'low_for_s'",
    ),
    "a share above 1": (
        valid_with("scheduler", {"dynarl": {"low_kv_use": 1.5}}),
        r"^scheduler.dynarl.low_kv_use=1.5: Input should be less than or equal to 1$",
    ),
    "too few moves to compare": (
        valid_with("scheduler", {"dynarl": {"released_shares": [0.5]}}),
        r"^scheduler.dynarl.released_shares=\[0.5\]: Tuple should have at least 2 items",
    ),
    "a time that does not pass": (
        valid_with("scheduler", {"decide_every_s": 0}),
        r"^scheduler.decide_every_s=0: Input should be greater than 0$",
    ),
    "an unknown key names the nearest": (
        valid_with("algorithm.group_sise", 4),
        r"unknown key 'algorithm.group_sise'; the nearest known key is 'group_size'",
    ),
    "an unknown key that is near to none names none": (
        valid_with("algorithm.zzz", 4),
        r"^unknown key 'algorithm.zzz' \(known here: clip_high, ",
    ),
    "a value in place of a section": (
        valid_with("task", "countdown"),
        r"^task must hold keys and values such as name:, found 'countdown'$",
    ),
    "a section left empty": (
        valid_with("model", None),
        r"^model must hold keys and values such as num_layers:, found nothing$",
    ),
    "a value in place of the nodes": (
        valid_with("cluster.nodes", 8),
        r"^cluster.nodes must hold keys and values such as n0: 4, found 8$",
    ),
    "a shape that lacks keys": (
        valid_with("model", {"num_layers": 2, "max_seq_len": 64}),
        r"^model.hidden_size, model.ffn_hidden_size, model.num_heads, model.num_kv_heads, model.head_dim missing: name "
        r"the whole shape, or a checkpoint's folder by model.path$",
    ),
    "a shape beside a checkpoint's": (
        valid_with("model", {"path": "somewhere", "num_layers": 2, "rope_theta": 1e6, "max_seq_len": 64}),
        r"^model.path sets the shape, and so do model.num_layers, model.rope_theta: leave them out",
    ),
    "an evaluation of no prompts of a task": (
        valid_with("evaluation", {"every": 2}),
        r"^evaluation.num_prompts is missing: a built-in task's held-out prompts have no end; set it to 64$",
    ),
    "an evaluation of a task on data": (
        valid_with("evaluation", {"every": 2, "num_prompts": 4, "data": "test.jsonl"}),
        r"^evaluation.data is given, and a built-in task has held-out prompts of its own: remove it$",
    ),
    "pass@k of fewer responses": (
        valid_with(
            "evaluation", {"every": 2, "num_prompts": 4, "samples_per_prompt": 4, "pass_at": [1, 8], "temperature": 1}
        ),
        r"^evaluation.pass_at=\[1, 8\] needs numbers of 1 to evaluation.samples_per_prompt=4: pass@k",
    ),
    "the same response several times": (
        valid_with("evaluation", {"every": 2, "num_prompts": 4, "samples_per_prompt": 4}),
        r"^evaluation.samples_per_prompt=4 with evaluation.temperature=0 makes the same response 4 times: set the",
    ),
    "an evaluation's responses longer than a sequence": (
        valid_with("evaluation", {"every": 2, "num_prompts": 4, "max_new_tokens": 1000}),
        r"^evaluation.max_new_tokens=1000 leaves no token for the prompt: it must be less than model.max_seq_len=",
    ),
    "a missing key is named": (valid_with("actor", {}), r"key 'actor.learning_rate' is missing"),
    "a layout that does not fit gives the equation and the legal size": (
        valid_with("actor.layout", {"tp": 2, "dp": 2}),
        r"tp \* pp \* dp \* cp = 2 \* 1 \* 2 \* 1 = 4 ranks, but cluster.component_placement.actor gives 2 GPUs; with "
        r"tp=2 pp=1 cp=1 use dp=1",
    ),
    "virtual stages without a pipeline": (
        valid_with("actor.layout", {"dp": 2, "vpp": 2}),
        r"^layout vpp=2 with pp=1: Megatron interleaves stages only; set vpp to 1 or pp > 1$",
    ),
    "replicas that do not divide the logical shards": (
        valid_with("actor", VALID["actor"] | {"num_logical_shards": 1}),
        r"^actor.layout: layout dp2 does not fit: dp=2 does not divide actor.num_logical_shards=1; legal dp: 1$",
    ),
    "a GPU listed twice names both": (
        valid_with("cluster.component_placement.rollout", "1,2"),
        r"component_placement.rollout names GPU 1, which actor has already",
    ),
    "a GPU listed twice in one role": (
        valid_with("cluster.component_placement.rollout", "2,2"),
        r"component_placement.rollout names GPU 2, which rollout has already",
    ),
    "a GPU beyond the cluster gives the range": (
        valid_with("cluster.component_placement.inference", "6"),
        r"names GPU 6, the cluster has 5 \(0-4\)",
    ),
    "GPUs of others and beyond the cluster are one line a component": (
        valid_with("cluster.component_placement.inference", "0-2,6-9"),
        r"^cluster.component_placement.inference names GPUs 0-1, which actor has already, GPU 2, which rollout has "
        r"already: list each GPU once; GPUs 6-9, the cluster has 5 \(0-4\)$",
    ),
    "a range longer than any cluster": (
        valid_with("cluster.component_placement.inference", "0-90000000"),
        r"inference: '0-90000000' is not a list of GPUs like '0-3' or '0,2,5', each below 65,536",
    ),
    "a node larger than any cluster": (
        valid_with("cluster.nodes", {"n0": 4_000_000_000}),
        r"cluster.nodes.n0=4000000000: Input should be less than or equal to 65536",
    ),
    "nodes of more GPUs than any cluster has": (
        valid_with("cluster.nodes", {"n0": 65_536, "n1": 1}),
        r"^cluster.nodes has 65,537 GPUs on 2 nodes, and a cluster at most 65,536: name fewer nodes, or fewer GPUs of",
    ),
    "a GPU that the rollout may get is in the cluster": (
        valid_with("rollout.standby", "1,9"),
        r"rollout.standby names GPU 9, the cluster has 5 \(0-4\)",
    ),
    "a GPU that the actor may get is of no other component": (
        valid_with("actor.standby", "1,4"),
        r"standby names GPU 1, which actor has already, GPU 4, which inference has already: list each GPU once",
    ),
    **{
        f"a rate of the trainer of {rate}": (
            valid_with("assumptions", {"costs": {"trainer_tokens_per_s": rate}}),
            r"^assumptions.costs.trainer_tokens_per_s=.*: Input should be " + want,
        )
        for rate, want in (
            (1e-323, "greater than or equal to 0.001"),
            (1e308, "less than or equal to 1000000000000000"),
        )
    },
    "a rate of the trainer on more GPUs than any cluster has": (
        valid_with("assumptions", {"costs": {"trainer_gpus": 10**400}}),
        r"^assumptions.costs.trainer_gpus=.*: Input should be less than or equal to 65536",
    ),
    "logical shards that are no power of two": (
        valid_with("actor.num_logical_shards", 6),
        "actor.num_logical_shards=6 must be a power of two that every dp of the actor divides",
    ),
    "micro-batches counted in two ways": (
        valid_with("actor", VALID["actor"] | {"micro_batch_size": 4, "max_tokens_per_microbatch": 512}),
        r"^actor.micro_batch_size=4 counts sequences and max_tokens_per_microbatch=512 tokens: set only one of them",
    ),
    "samples that may be refused once the job runs": (
        valid_with("actor", VALID["actor"] | {"oversize_samples": "refuse", "max_tokens_per_microbatch": 48}),
        r"^actor.max_tokens_per_microbatch=48 is less than the 64 positions of a sample of model.max_seq_len=64, .*: "
        "raise it to 64, or set",
    ),
    "samples refused over no cap": (
        valid_with("actor.oversize_samples", "refuse"),
        r"^actor.oversize_samples=refuse concerns samples over actor.max_tokens_per_microbatch: set that too$",
    ),
    "sequences without padding on a CPU": (
        valid_with("actor", VALID["actor"] | {"packing": "thd", "max_tokens_per_microbatch": 512}),
        "^actor.packing=thd uses the attention of Transformer Engine, which needs CUDA, and cluster.device is cpu: "
        "set packing to padded$",
    ),
    "sequences without padding and without a cap": (
        valid_with("cluster", VALID["cluster"] | {"device": "cuda"}) | {"actor": VALID["actor"] | {"packing": "thd"}},
        "^actor.packing=thd applies only with actor.max_tokens_per_microbatch: set that too$",
    ),
    "a GPU that the actor may get beyond the cluster": (
        valid_with("actor.standby", "5"),
        r"actor.standby names GPU 5, the cluster has 5 \(0-4\)",
    ),
    "a placement that is no list": (
        valid_with("cluster.component_placement.inference", "all"),
        r"'all' is not a list of GPUs",
    ),
    "minibatches that do not divide name the legal ones": (
        valid_with("algorithm.n_minibatches", 3),
        r"n_minibatches=3 does not divide prompts_per_iteration=4; legal: 1, 2, 4",
    ),
    "extra prompts that replace nothing": (
        valid_with("algorithm.max_extra_prompts", 8),
        r"max_extra_prompts=8 replaces groups that filter_zero_std drops, and filter_zero_std is false: set it to true",
    ),
    "groups that can have no spread": (
        valid_with("algorithm", VALID["algorithm"] | {"filter_zero_std": True, "group_size": 1}),
        r"filter_zero_std=true drops every group of group_size=1",
    ),
    "a negative number": (
        valid_with("algorithm.group_size", -1),
        r"algorithm.group_size=-1: .* greater than or equal to 1",
    ),
    "heads that do not divide": (valid_with("model.num_kv_heads", 3), r"num_heads=4 does not divide by num_kv_heads=3"),
    "responses that leave no room for a prompt": (
        valid_with("algorithm.max_new_tokens", 64),
        r"max_new_tokens=64 leaves no room for a prompt in model.max_seq_len=64",
    ),
    "a job name that cannot name a stream": (valid_with("job", "My Job"), r"job name 'My Job' must be"),
    "more requests than an embedded engine takes": (
        valid_with("rollout.max_running_requests", 5000),
        r"rollout.max_running_requests=5000 is more than an embedded engine .*: lower it to 256 or less",
    ),
    "SGLang without its environment": (
        valid_with("rollout.engine", "sglang"),
        r"rollout.engine=sglang needs rollout.sglang.python, .*make .venv-sglang",
    ),
    "a server's start that its command does not wait for": (
        valid_with("rollout", {"engine": "sglang", "sglang": {"python": "bin/python", "start_timeout_s": 120}}),
        r"start_timeout_s=120 is not below runtime.command_deadline_s=120, the deadline .*: lower the first",
    ),
    "an option of SGLang that Tidegate sets": (
        valid_with("rollout", {"engine": "sglang", "sglang": {"python": "bin/python", "options": {"port": 1}}}),
        r"rollout.sglang.options: Tidegate sets SGLang's option port itself: leave it out",
    ),
    "an option of SGLang with an underscore": (
        valid_with("rollout", {"engine": "sglang", "sglang": {"python": "bin/python", "options": {"page_size": 1}}}),
        r"SGLang has no option 'page_size': write it in lower case with dashes",
    ),
    "an engine that there is not": (
        valid_with("rollout.engine", "vllm"),
        r"rollout.engine='vllm': .*'embedded' or 'sglang'",
    ),
    "a lead that outlives its lease": (
        valid_with("runtime.lead_ttl_s", 60),
        r"lead_ttl_s=60.0 is longer than lease_ttl_s",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_refused_with_a_remedy(case: str) -> None:
    raw, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


def test_a_job_has_a_task_or_data_with_rewards() -> None:
    parse_config(on_data())
    task = {"name": "count"}
    cases: list[dict[str, Any]] = [
        {"task": task},
        {"data": None, "rewards": []},
        {"rewards": []},
        {"task": task, "data": None},
    ]
    for wrong in cases:
        with pytest.raises(ConfigError, match=r"task|rewards"):
            parse_config(on_data(**wrong))


def test_only_a_job_on_data_names_evaluation_data() -> None:
    evaluation = {"every": 2, "num_prompts": 4}
    parse_config(on_data(evaluation={**evaluation, "data": "test.jsonl"}))
    with pytest.raises(ConfigError, match=r"^evaluation.data is empty: name a file"):
        parse_config(on_data(evaluation=evaluation))
    parse_config(valid_with("evaluation", evaluation))
    with pytest.raises(ConfigError, match=r"^evaluation.data is given, and a built-in task has held-out prompts"):
        parse_config(valid_with("evaluation", {**evaluation, "data": "test.jsonl"}))


def test_all_faults_between_sections_are_reported_at_once() -> None:
    raw = valid_with("algorithm.n_minibatches", 3)
    raw["cluster"]["component_placement"]["inference"] = "6"
    with pytest.raises(ConfigError, match=r"(?s)GPU 6.*n_minibatches=3"):
        parse_config(raw)
