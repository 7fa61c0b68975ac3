"""A config of RLinf's is read unchanged: its keys are translated, and unsupported values are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.__main__ import main
from tests.unit.config.config_files import written
from tidegate.config.files import SourcedConfig, Sources, load_sources
from tidegate.config.job_config import ConfigError
from tidegate.config.reading.layers import Layer, Origin, paths_in
from tidegate.config.sections.scheduler import RLinfSection, SchedulerSection
from tidegate.rlinf.reading import Reading, read_rlinf
from tidegate.rlinf.rules import DERIVED, RULES, SAME_AS, WITHOUT_EFFECT, OnlyAs
from tidegate.rlinf.translation import MISSING, Translation
from tidegate.tasks.tokenizer import build_tokenizer
from tidegate.types import Layout, Role

PIPELINED = Path(__file__).with_name("pipelined.yaml")
CORRECTED = (
    "algorithm.early_stop_imp_ratio=null",
    "actor.model.precision=fp32",
    "rollout.sglang.python=.venv-sglang/bin/python",
)
SHAPE = (
    "model={num_layers: 2, hidden_size: 16, ffn_hidden_size: 32, num_heads: 2, num_kv_heads: 2, head_dim: 8}",
    "rollout.model.model_path=''",
)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "rlinf.md"


def read(*overrides: str) -> SourcedConfig:
    return load_sources(Sources([PIPELINED], (*CORRECTED, *overrides)))


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(*overrides)
    return str(error.value).splitlines()


def test_all_unsupported_values_of_a_config_are_refused_with_their_lines_and_remedies() -> None:
    lines = PIPELINED.read_text().splitlines()
    number = {
        key: 1 + next(n for n, line in enumerate(lines) if key in line)
        for key in ("early_stop", "precision: fp16", "precision: ${actor")
    }
    with pytest.raises(ConfigError) as error:
        load_sources(Sources([PIPELINED]))
    assert str(error.value).splitlines() == [
        "algorithm.early_stop_imp_ratio=5.0 is not supported: set it to null: no micro-batch is left out; clipping "
        f"and actor.clip_grad bound an update [{PIPELINED}:{number['early_stop']}]",
        *(
            f"{key}='fp16' is not supported: set it to fp32 or bf16 [{PIPELINED}:{number[text]}]"
            for key, text in (("rollout.precision", "precision: ${actor"), ("actor.model.precision", "precision: fp16"))
        ),
    ]


def test_keys_with_a_counterpart_are_translated() -> None:
    config = read().config
    assert (config.job, config.seed, config.output_dir) == ("boba-1-5b-16x512", 1234, "../results")
    assert config.cluster.nodes == {"n0": 8}
    assert config.cluster.device == "cpu"
    assert config.placement(Role.ROLLOUT) == ("n0/2", "n0/3", "n0/4", "n0/5")
    assert config.layout(Role.ACTOR) == Layout(tp=2)
    assert config.layout(Role.INFERENCE) == Layout(tp=2)
    algorithm = config.algorithm
    assert (algorithm.iterations, algorithm.prompts_per_iteration, algorithm.group_size) == (200, 512, 16)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coefficient) == (0.2, 0.28, 0.001)
    assert (config.model.max_seq_len, algorithm.max_new_tokens, algorithm.old_logprobs) == (2048, 1024, "trainer")
    actor = config.actor
    assert (actor.precision, actor.recompute) == ("fp32", "full")
    assert (actor.learning_rate, actor.adam_beta2, actor.adam_epsilon) == (2e-5, 0.98, 1e-5)
    assert (actor.weight_decay, actor.clip_grad, actor.micro_batch_size) == (0.05, 0.8, 1)
    assert actor.lr_warm_up_samples == 5 * 512 * 16 // 4
    assert config.rollout.max_running_requests == 64
    assert (config.rollout.engine, config.rollout.sglang.dtype) == ("sglang", "float32")
    assert config.checkpoint.every == 50
    assert config.runtime.collective_timeout_s == 1800


def test_data_tokenizer_and_reward_are_translated_with_paths_relative_to_the_file() -> None:
    config = read().config
    assert config.data is not None
    assert config.data.train == str(PIPELINED.parent / "data" / "train.jsonl")
    assert (config.data.answer_key, config.data.max_prompt_tokens, config.data.chat_template) == ("solutions", 1024, "")
    assert config.model.path == config.model.tokenizer == str(PIPELINED.parent / "models" / "Qwen2.5-1.5B")
    assert [reward.name for reward in config.rewards] == ["math_verify"]


def test_a_config_without_an_environment_for_sglang_is_refused() -> None:
    (fault,) = refused("rollout.sglang.python=''")
    assert "needs rollout.sglang.python" in fault
    assert read("rollout.sglang.python=''", "rollout.engine=embedded").config.rollout.engine == "embedded"


def test_every_key_without_effect_has_a_note() -> None:
    notes = "\n".join(read().notes)
    for key in ("rollout.gpu_memory_utilization", "actor.offload_grad", "reward.reward_scale", "hydra.run.dir"):
        assert key in notes
    assert "runner.experiment_name: the job is named boba-1-5b-16x512" in notes
    assert "cluster.component_placement.reward: rewards are computed in processes" in notes
    assert "algorithm.use_valid_token_scale: token-mean is over all tokens of a minibatch" in notes


def test_no_key_is_skipped_in_silence() -> None:
    """Each key is Tidegate's own, is translated, has a note, or has only one supported value."""
    sourced = read()
    read_from = {origin.place.rpartition(" ")[2] for origin in sourced.layer.origins.values()}
    noted = {word.strip(",:") for note in sourced.notes for word in note.split()}
    stands = SAME_AS.keys() | {key for key, rule in RULES.items() if isinstance(rule, OnlyAs)}
    ours = {".".join(map(str, path)) for path in sourced.layer.origins}
    # Another key takes precedence over each of these, or its value is the fixed behaviour.
    yields = {"algorithm.clip_ratio_low", "actor.lr_sched.lr_warmup_iters", "actor.lr_sched.lr_decay_iters"}
    yields |= {"actor.model.megatron_checkpoint", "actor.megatron.use_hf_ckpt", "runner.enable_dynamic_batch_size"}
    written_keys = set(leaves(yaml.safe_load(PIPELINED.read_text())))
    assert written_keys - read_from - noted - stands - ours - yields == set()


def test_a_config_in_our_keys_is_unchanged() -> None:
    values = {"algorithm": {"group_size": 4}, "seed": 3}
    layer = Layer(values, dict.fromkeys(paths_in(values, ()), Origin("ours.yaml:1", Path(), 0)))
    assert read_rlinf(layer, {("algorithm", "group_size"), ("seed",)}) == Reading(layer)


def test_a_key_that_is_taken_is_no_longer_in_the_values() -> None:
    layer = Layer({"actor": {"seed": 1}, "seed": 2}, {("actor", "seed"): Origin("r.yaml:1", Path(), 0)})
    translation = Translation(layer)
    assert translation.take("actor.seed") == 1
    assert translation.now("actor.seed") is MISSING
    assert translation.layer == Layer({"seed": 2}, {})


def leaves(value: Any, at: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [at]
    return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{at}.{key}".lstrip("."))]


def test_rlinfs_scheduler_becomes_the_policy_with_its_rules() -> None:
    assert read().config.scheduler == SchedulerSection(policy="static"), "its config says so"
    switches = ("cluster.auto_scheduler=true", "cluster.use_pre_process_policy=true")
    scheduler = read(*switches, "cluster.use_wait_before_last_iter_policy=false").config.scheduler
    assert scheduler.policy == "rlinf"
    assert scheduler.rlinf == RLinfSection(
        use_pre_process_policy=True, use_wait_before_last_iter_policy=False, max_running_requests=64
    )
    assert read(*switches, "rollout.max_running_requests=128").config.scheduler.rlinf.max_running_requests == 128


def test_rlinfs_threshold_of_running_sequences_is_translated_and_its_default_left_out() -> None:
    lends = ("cluster.auto_scheduler=true", "cluster.use_pre_process_policy=true")
    got = read(*lends, "cluster.preprocess_threshold=300")
    assert got.config.scheduler.rlinf.preprocess_threshold == 300
    assert not any("preprocess_threshold" in note for note in got.notes)
    for default in ("-1", "null"):
        assert read(f"cluster.preprocess_threshold={default}").config.scheduler.rlinf.preprocess_threshold is None
    (note,) = [each for each in read("cluster.preprocess_threshold=300").notes if "preprocess_threshold" in each]
    assert "without effect here: cluster.use_pre_process_policy is not true" in note


SCHEDULER_KEYS = (
    "monitor_interval=2",
    "assign_policy=even",
    "migrate_out_max_bs=16",
    "rollout_use_all_gpus=true",
    "fuse_rollout_inference_only=true",
    "recreate_nccl_groups=true",
)


@pytest.mark.parametrize("given", SCHEDULER_KEYS)
def test_a_key_of_rlinfs_scheduler_without_effect_is_noted_with_what_is_done_instead(given: str) -> None:
    plain = read("cluster.auto_scheduler=true")
    got = read("cluster.auto_scheduler=true", f"cluster.{given}")
    assert got.config == plain.config
    (note,) = set(got.notes) - set(plain.notes)
    assert note.startswith(f"cluster.{given.partition('=')[0]}: ")


def test_components_in_an_order_in_which_rlinfs_actor_cannot_grow_are_read_as_they_are() -> None:
    turned = "cluster.component_placement={rollout: 0-3, inference: 4-5, actor: 6-7}"
    config = read("cluster.auto_scheduler=true", turned).config
    assert config.scheduler.policy == "rlinf"
    assert config.placement(Role.ACTOR) == ("n0/6", "n0/7")


def test_every_axis_of_a_layout_is_translated() -> None:
    sizes = ("context_parallel_size=2", "pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=3")
    eight = ("cluster.component_placement={actor: 0-7, rollout: 8-9, inference: 10-11}", "cluster.nodes={n0: 12}")
    given = (*eight, *(f"actor.model.{size}" for size in sizes))
    want = Layout(tp=2, pp=2, cp=2, vpp=3)
    assert read(*given).config.layout(Role.ACTOR) == want
    assert read(*given, "actor.model.expert_model_parallel_size=2").config.layout(Role.ACTOR) == replace(want, ep=2)


def test_a_later_layer_takes_precedence_whichever_names_it_uses() -> None:
    assert read("algorithm.prompts_per_iteration=8").config.algorithm.prompts_per_iteration == 8
    assert read("data.rollout_batch_size=16").config.algorithm.prompts_per_iteration == 16
    both = read("algorithm.prompts_per_iteration=8", "data.rollout_batch_size=16")
    assert both.config.algorithm.prompts_per_iteration == 16
    assert read("actor.layout={tp: 1, pp: 1, dp: 2}").config.layout(Role.ACTOR) == Layout(dp=2)
    assert read("actor.layout.tp=1").config.layout(Role.ACTOR) == Layout(dp=2)


def test_two_names_for_one_setting_in_one_file_are_refused(tmp_path: Path) -> None:
    over = written(tmp_path, "over.yaml", "algorithm: {prompts_per_iteration: 8}\ndata: {rollout_batch_size: 8}\n")
    with pytest.raises(ConfigError, match=r"data.rollout_batch_size and algorithm.prompts_per_iteration .*: keep one"):
        load_sources(Sources([PIPELINED, over], CORRECTED))


def test_a_fault_of_a_translated_value_names_the_key_in_the_file() -> None:
    (fault,) = refused("data.rollout_batch_size=510")
    assert fault.startswith("algorithm.n_minibatches=4 does not divide prompts_per_iteration=510")
    assert "algorithm.prompts_per_iteration: override data.rollout_batch_size data.rollout_batch_size" in fault


PLACEMENTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "components in one key": (("{'actor,inference': 0, rollout: 1}",), "names GPU 0, which actor has already"),
    "all of a known number of GPUs": (
        ("{actor: all, rollout: 8, inference: 9}", "cluster.nodes={n0: 10}"),
        "names GPU 8, which actor has already",
    ),
    "all of an unknown number": (
        ("{actor: all, rollout: 8, inference: 9}",),
        "actor=all: the number of GPUs is unknown",
    ),
    "all of more GPUs than any cluster has": (
        ("{actor: all, rollout: 8, inference: 9}", "cluster.num_nodes=1000000000", "cluster.num_gpus_per_node=8"),
        "actor=all: 8,000,000,000 GPUs are more than the 65,536 that a cluster may have",
    ),
    "more nodes than any cluster has GPUs": (
        ("{actor: 0, rollout: 1, inference: 2}", "cluster.num_nodes=1000000000", "cluster.num_gpus_per_node=8"),
        "num_nodes=1000000000 must be a number from 1 to 65,536",
    ),
    "a group of nodes": (("{actor: {node_group: a800, placement: 0-1}}",), "groups of nodes are not known; list GPUs"),
    "processes on a GPU": (("{actor: '0-1:0-3', rollout: 2, inference: 3}",), "a GPU has one process; .* such as 0-1"),
    "a component that there is not": (("{env: 0-1}",), "there is no component 'env'; leave it out"),
    "nodes that the GPUs do not divide by": (
        ("{actor: 0-1, rollout: 2-5, inference: 6}", "cluster.num_nodes=2"),
        "the 7 GPUs that cluster.component_placement reaches do not divide by it; give cluster.nodes",
    ),
}


def test_a_decay_of_the_rate_is_translated_with_its_end() -> None:
    overrides = [f"actor.lr_sched.{text}" for text in ("lr_decay_style=cosine", "min_lr=2e-6", "lr_warmup_init=1e-7")]
    actor = read(*overrides, "actor.lr_sched.lr_decay_iters=700").config.actor
    schedule = actor.lr_schedule
    assert (schedule.decay, schedule.budget_updates, schedule.minimum, schedule.initial) == ("cosine", 700, 2e-6, 1e-7)
    assert actor.lr_warm_up_samples == 350 * 512 * 16 // 4


@pytest.mark.parametrize("case", PLACEMENTS)
def test_an_impossible_placement_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    (placement, *overrides), want = PLACEMENTS[case]
    raw = yaml.safe_load(PIPELINED.read_text())
    raw["cluster"]["component_placement"] = yaml.safe_load(placement)
    with pytest.raises(ConfigError, match=want):
        load_sources(Sources([written(tmp_path, "r.yaml", raw)], (*CORRECTED, *overrides)))


def test_components_may_share_a_placement_line_and_nodes_may_be_a_number(tmp_path: Path) -> None:
    raw = yaml.safe_load(PIPELINED.read_text())
    raw["cluster"] = {"num_nodes": 2, "num_gpus_per_node": 4, "component_placement": {"actor": "0-1", "rollout": "2-5"}}
    raw["cluster"]["component_placement"]["inference,reward"] = "6-7"
    config = load_sources(Sources([written(tmp_path, "r.yaml", raw)], CORRECTED)).config
    assert config.cluster.nodes == {"n0": 4, "n1": 4}
    assert config.placement(Role.INFERENCE) == ("n1/2", "n1/3")


REFUSED = {
    "a scheduler that is on or off": ("cluster.auto_scheduler=maybe", "='maybe' must be true or false"),
    "a share as a number of sequences": ("cluster.preprocess_threshold=0.5", "must be a number of sequences from 1 on"),
    "a task of another kind": ("runner.task_type=embodied", "set it to reasoning"),
    "a folder to go on from": ("runner.resume_dir=old", "set it to null and start with --resume"),
    "epochs": ("runner.max_steps=-1", "a job needs its number of iterations: set runner.max_steps to it"),
    "whitened advantages": ("algorithm.normalize_advantages=true", "set it to false, as in RLinf's pipelined mode"),
    "a truth written as a number": (
        "algorithm.normalize_advantages=1",
        "algorithm.normalize_advantages=1 is not supported",
    ),
    "another engine": ("rollout.rollout_backend=vllm", "set it to sglang, or leave it out for the embedded engine"),
    "few likeliest tokens": ("algorithm.sampling_params.top_k=50", "set it to -1; algorithm.top_p narrows sampling"),
    "another advantage": ("algorithm.adv_type=reinpp", "set it to grpo"),
    "a critic": ("critic.use_critic_model=true", "GRPO has no critic"),
    "FSDP": ("actor.training_backend=fsdp", "set it to megatron"),
    "engines on several GPUs": ("rollout.tensor_parallel_size=2", "set it to 1: an engine has one GPU"),
    "a decay that there is not": ("actor.lr_sched.lr_decay_style=cubic", "set it to constant, linear, cosine"),
    "a task without a word": ("runner.task_type=null", "set it to reasoning"),
    "two rates": ("actor.lr_sched.max_lr=1", "actor.lr_sched.max_lr=1 and actor.learning_rate=2e-05 stand for one"),
    "a reward that there is not": ("reward.reward_type=code", "is not supported: math; others are written as rewards"),
    "several files to evaluate on": (
        "data.val_data_paths=[a.jsonl, b.jsonl]",
        "data.val_data_paths must be one path: put several files into a folder and name that (evaluation.data)",
    ),
    "a share of an epoch between validations": (
        "runner.val_check_interval=0.5",
        "runner.val_check_interval=0.5 must be a number of iterations, or -1 for no evaluation",
    ),
    "dynamic sizes of a word": ("runner.enable_dynamic_batch_size=auto", "='auto' must be true or false"),
    "several files": ("data.train_data_paths=[a.jsonl, b.jsonl]", "put several files into a folder"),
    "a list of files to compose": ("defaults=[model/qwen]", "tidegate run A.yaml B.yaml"),
    "a key that RLinf has not": ("actor.optim.lrr=1", "unknown key 'actor.optim.lrr'; the nearest that RLinf has is"),
    "a key that nobody has": ("algorithm.group_sise=1", "unknown key 'algorithm.group_sise'; the nearest known key is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_value_is_refused_by_name_with_the_remedy(case: str) -> None:
    override, want = REFUSED[case]
    asks = ("evaluation.every=5",) if "val_data" in override else ()
    (fault,) = refused(*asks, override)
    assert want in fault
    assert f"[override {override.partition('=')[0]}]" in fault


def test_micro_batches_of_dynamic_sizes_are_translated(tmp_path: Path) -> None:
    dynamic = read("runner.enable_dynamic_batch_size=true")
    assert (dynamic.config.actor.max_tokens_per_microbatch, dynamic.config.actor.micro_batch_size) == (2048, 16)
    assert any(note.startswith("runner.max_tokens_per_mbs: padding counts") for note in dynamic.notes)
    assert any(note.startswith("algorithm.training_batch_size_per_gpu: without effect") for note in dynamic.notes)
    raw = yaml.safe_load(PIPELINED.read_text())
    raw["runner"] |= {"enable_dynamic_batch_size": True}
    del raw["runner"]["max_tokens_per_mbs"]
    with pytest.raises(ConfigError, match=r"the number of tokens .* is unknown; set runner.max_tokens_per_mbs"):
        load_sources(Sources([written(tmp_path, "r.yaml", raw)], CORRECTED))


def test_a_dry_run_prints_a_config_in_our_keys_and_notes_the_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tokenizer(["two", "and", "four"]).save(tmp_path / "words.json")
    written(tmp_path, "train.jsonl", '{"prompt": "two and two", "solutions": ["four"]}\n')
    mended = (*CORRECTED, *SHAPE, f"runner.output_dir={tmp_path}", f"data.train_data_paths=[{tmp_path}/train.jsonl]")
    tokenizer = f"actor.tokenizer.tokenizer_model={tmp_path}/words.json"
    # math_verify, trackers and SGLang need packages of their own.
    plain = ("rewards=[{name: exact_match}]", "runner.logger.logger_backends=[]", "rollout.engine=embedded")
    assert main(["run", str(PIPELINED), *mended, tokenizer, *plain, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"  prompts_per_iteration: 512  # {PIPELINED}:" in said.out
    assert "data.rollout_batch_size\n" in said.out
    assert "actor.offload_weight" in said.err
    ours = load_sources(Sources([written(tmp_path, "ours.yaml", said.out)]))
    assert (ours.notes, ours.config.algorithm.clip_high) == ((), 0.28)


@pytest.mark.parametrize("key", ["rollout.model.model_path", "rollout.model_dir"])
def test_the_checkpoint_to_start_from_is_translated(key: str, tmp_path: Path) -> None:
    raw = yaml.safe_load(PIPELINED.read_text())
    del raw["rollout"]["model"], raw["actor"]["tokenizer"], raw["actor"]["megatron"], raw["reward"]["tokenizer"]
    config = load_sources(
        Sources([written(tmp_path, "r.yaml", raw)], (*CORRECTED, f"{key}=/models/Qwen2.5-1.5B"))
    ).config
    assert config.model.path == "/models/Qwen2.5-1.5B"


@pytest.mark.parametrize("says", ["use_dist_ckpt=true", "ckpt_format=torch_dist"])
@pytest.mark.parametrize("key", ["actor.model.megatron_checkpoint", "actor.checkpoint_load_path"])
def test_megatrons_weights_are_translated_only_in_the_format_torch_dist(key: str, says: str) -> None:
    overrides = ("actor.megatron.use_hf_ckpt=false", f"{key}=/saved/iter_0000007")
    assert read(*overrides, f"actor.megatron.{says}").config.model.torch_dist == "/saved/iter_0000007"
    (fault,) = refused(*overrides)
    assert fault.startswith(f"{key}=/saved/iter_0000007: the only Megatron format that is read is torch_dist")


def test_a_scale_of_rewards_is_refused_where_nothing_cancels_it() -> None:
    (fault,) = refused("algorithm.normalize_std=false")
    assert fault.startswith(
        "reward.reward_scale=5.0 has an effect where algorithm.normalize_std is false: leave it out and set"
    )
    assert read("algorithm.normalize_std=true").config.algorithm.normalize_std


def test_a_config_without_any_weights_is_refused() -> None:
    (fault,) = refused("actor.megatron.use_hf_ckpt=false")
    assert "no weights are named; set it to true, for those of rollout.model.model_path" in fault


def test_trackers_are_translated() -> None:
    tracking = read().config.tracking
    assert (tracking.tensorboard, tracking.wandb.mode, tracking.wandb.project) == (True, "disabled", "rlinf")
    tracking = read("runner.logger.logger_backends=[wandb]").config.tracking
    assert (tracking.tensorboard, tracking.wandb.mode) == (False, "online")
    (fault,) = refused("runner.logger.logger_backends=[tensorboard, swanlab]")
    assert "runner.logger.logger_backends names 'swanlab': the known ones are tensorboard and wandb" in fault


def test_a_save_interval_of_minus_1_saves_only_the_last_iteration() -> None:
    assert read("runner.save_interval=-1", "runner.max_steps=7").config.checkpoint.every == 7


def test_validation_is_translated_with_its_data() -> None:
    sourced = read("runner.val_check_interval=10")
    evaluation = sourced.config.evaluation
    assert evaluation is not None
    assert (evaluation.every, evaluation.data) == (10, str(PIPELINED.parent / "data" / "train.jsonl"))
    want = "runner.val_check_interval: the weights before the first iteration are evaluated too"
    assert any(note.startswith(want) for note in sourced.notes)


@pytest.mark.parametrize("interval", [-1, 0, "null"])
def test_an_interval_that_turns_validation_off_leaves_it_to_our_keys(interval: str) -> None:
    sourced = read(f"runner.val_check_interval={interval}")
    assert sourced.config.evaluation is None
    notes = "\n".join(sourced.notes)
    assert "runner.val_check_interval: turns evaluation off; evaluation.every turns it on" in notes
    assert "data.val_data_paths: without effect here: evaluation is off" in notes
    sourced = read(
        f"runner.val_check_interval={interval}", "evaluation={every: 2, data: held.jsonl, samples_per_prompt: 1}"
    )
    assert sourced.config.evaluation is not None
    assert (sourced.config.evaluation.every, Path(sourced.config.evaluation.data).name) == (2, "held.jsonl")


def test_a_later_layer_may_turn_evaluation_off() -> None:
    assert read("runner.val_check_interval=10", "evaluation=null").config.evaluation is None


KNOWN = [*RULES, *DERIVED, *SAME_AS, *(key for keys in WITHOUT_EFFECT.values() for key in keys)]


def test_the_page_names_every_known_key_of_rlinf() -> None:
    page = PAGE.read_text()
    assert [key for key in KNOWN if f"`{key}`" not in page] == []


def test_a_key_of_rlinf_is_in_one_table() -> None:
    assert len(KNOWN) == len(set(KNOWN))
