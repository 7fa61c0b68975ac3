"""The translation of each key of an RLinf config: into another key, into a fixed behaviour, or into nothing.

The tables cover RLinf's reasoning jobs on Megatron. Keys that depend on others are in `DERIVED` and in `SAME_AS`;
`tidegate.rlinf.derived` reads them. A key in `WITHOUT_EFFECT` changes no weight and no sample here. A note gives the
reason.

Invariants:
- A key is in one table. [test_rlinf: a_key_of_rlinf_is_in_one_table]
- An unsupported value is refused with the text to write in its place. [test_rlinf: an_unsupported_value_is_refused]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Becomes:
    """The same setting under another name."""

    key: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    """RLinf's words with Tidegate's. Another word is refused with the text `instead`. Empty: any value is kept."""
    instead: str = ""


@dataclass(frozen=True, slots=True)
class OnlyAs:
    """A setting that Tidegate has only with one of `values` or a number from `at_least` on.

    Another value is refused with the text `instead`.
    """

    values: tuple[Any, ...]
    instead: str
    at_least: float | None = None
    notes: Mapping[Any, str] = field(default_factory=dict)
    """The difference to RLinf for a supported value."""


Rule = Becomes | OnlyAs

SAME_AS: Mapping[str, str] = {
    "actor.lr_sched.max_lr": "actor.learning_rate",
    "actor.model.seq_length": "model.max_seq_len",
    "actor.model.encoder_seq_length": "model.max_seq_len",
}
"""Keys of RLinf's that repeat the value of one of Tidegate's keys."""

_ONE_ENGINE_A_GPU = "set it to 1: an engine has one GPU; cluster.component_placement.rollout gives more of them"
_LLAMA = "leave it out: models are Llama, Qwen2, Qwen3 and Qwen3-MoE"
_NO_CRITIC = "set it to false: GRPO has no critic, and rewards come from functions (rewards: [{name: function, ...}])"
_LENGTH_PENALTY = "leave it out; a penalty on length is a reward of its own (rewards: [{name: function, ...}])"
_ENGINE_PRECISION = Becomes(
    "rollout.sglang.dtype",
    {"fp32": "float32", "32": "float32", 32: "float32", "bf16": "bfloat16"},
    "set it to fp32 or bf16",
)

RULES: Mapping[str, Rule] = {
    "actor.seed": Becomes("seed"),
    "runner.output_dir": Becomes("output_dir"),
    "cluster.use_pre_process_policy": Becomes("scheduler.rlinf.use_pre_process_policy"),
    "cluster.use_wait_before_last_iter_policy": Becomes("scheduler.rlinf.use_wait_before_last_iter_policy"),
    "runner.task_type": OnlyAs(("reasoning", "math"), "set it to reasoning: the others are no language-model GRPO"),
    "runner.logger.project_name": Becomes("tracking.wandb.project"),
    "runner.resume_dir": OnlyAs((None,), "set it to null and start with --resume: a job goes on from its own folder"),
    "algorithm.recompute_logprobs": Becomes(
        "algorithm.old_logprobs", {True: "trainer", False: "engine"}, "true or false"
    ),
    "algorithm.loss_agg_func": Becomes("algorithm.loss_aggregation"),
    "algorithm.kl_beta": Becomes("algorithm.kl_coefficient"),
    "algorithm.kl_penalty_type": OnlyAs(("low_var_kl", "k3"), "set it to low_var_kl: the KL term is k3"),
    "algorithm.sampling_params.temperature": Becomes("algorithm.temperature"),
    "algorithm.sampling_params.top_p": Becomes("algorithm.top_p"),
    "algorithm.sampling_params.max_new_tokens": Becomes("algorithm.max_new_tokens"),
    "algorithm.sampling_params.min_new_tokens": OnlyAs(
        (0, 1),
        "set it to 0: the model alone ends a response",
        notes={1: "a response may end at its first token"},
    ),
    "algorithm.sampling_params.use_greedy": OnlyAs((False,), "set it to false: GRPO samples"),
    "algorithm.sampling_params.do_sample": OnlyAs((True,), "set it to true: GRPO samples"),
    "algorithm.sampling_params.top_k": OnlyAs((-1, 0), "set it to -1; algorithm.top_p narrows sampling", 1_000_000),
    "algorithm.sampling_params.repetition_penalty": OnlyAs(
        (1,), "set it to 1: samples follow the model's distribution"
    ),
    "algorithm.loss_type": OnlyAs(("actor", "ppo", "grpo"), "set it to actor: the clipped ratio of each token"),
    "algorithm.adv_type": OnlyAs(("grpo",), "set it to grpo"),
    "algorithm.normalize_advantages": OnlyAs(
        (False,),
        "set it to false, as in RLinf's pipelined mode: advantages are normalised in a group, not over a batch",
    ),
    "algorithm.early_stop_imp_ratio": OnlyAs(
        (None,), "set it to null: no micro-batch is left out; clipping and actor.clip_grad bound an update"
    ),
    "algorithm.clip_ratio_c": OnlyAs((None,), "set it to null: ratios are clipped once"),
    "algorithm.entropy_bonus": OnlyAs((0,), "set it to 0: the loss has no term of entropy"),
    "algorithm.max_num_gen_batches": OnlyAs(
        (1,), "set it to 1; algorithm.filter_zero_std and max_extra_prompts sample dynamically"
    ),
    "algorithm.shuffle_rollout": OnlyAs((False,), "set it to false; algorithm.minibatch_order sets the order"),
    "algorithm.importance_sampling_fix": OnlyAs(
        (False,), "set it to false, and algorithm.importance_cap to a cap of the trainer/engine weights"
    ),
    "algorithm.use_valid_token_scale": OnlyAs(
        (True, False),
        "true or false",
        notes={
            False: "token-mean is over all tokens of a minibatch, as with true, and not the mean of micro-batch means"
        },
    ),
    "data.type": OnlyAs(("math",), "set it to math: prompts and answers are columns of JSONL or Parquet"),
    "data.rollout_batch_size": Becomes("algorithm.prompts_per_iteration"),
    "data.max_prompt_length": Becomes("data.max_prompt_tokens"),
    "data.filter_prompt_by_length": OnlyAs(
        (True, False),
        "true or false",
        notes=dict.fromkeys(
            (True, False), "a prompt that is too long is neither dropped nor cut, but refused with its line number"
        ),
    ),
    "data.data_size": OnlyAs((None, -1), "leave it out: all records of a file are used"),
    "data.apply_chat_template": Becomes("data.chat_template", {True: "tokenizer", False: ""}, "true or false"),
    "data.apply_chat_template_kwargs": Becomes("data.chat_template_kwargs"),
    "actor.training_backend": OnlyAs(("megatron",), "set it to megatron"),
    "actor.mcore_gpt": OnlyAs((True,), "set it to true: models are megatron-core's"),
    "actor.spec_name": OnlyAs(("decoder_gpt", "local_gpt"), "set it to decoder_gpt"),
    "actor.megatron.distributed_backend": Becomes("cluster.device", {"nccl": "cuda", "gloo": "cpu"}, "nccl or gloo"),
    "actor.model.precision": Becomes(
        "actor.precision", {"fp32": "fp32", "32": "fp32", 32: "fp32", "bf16": "bf16"}, "set it to fp32 or bf16"
    ),
    "actor.model.recompute_granularity": Becomes(
        "actor.recompute", {None: "none", "selective": "selective", "full": "full"}, "set it to selective or full"
    ),
    "actor.model.attention_softmax_in_fp32": OnlyAs((True,), "set it to true"),
    "actor.model.add_bias_linear": OnlyAs((False,), _LLAMA),
    "actor.model.activation": OnlyAs(("swiglu",), _LLAMA),
    "actor.model.normalization": OnlyAs(("rmsnorm",), _LLAMA),
    "actor.model.position_embedding_type": OnlyAs(("rope",), _LLAMA),
    "actor.model.expert_tensor_parallel_size": OnlyAs((None, 1), "leave it out: experts are split as actor.layout.tp"),
    "actor.optim.optimizer": OnlyAs(("adam",), "set it to adam"),
    "actor.optim.lr": Becomes("actor.learning_rate"),
    "actor.optim.adam_beta1": Becomes("actor.adam_beta1"),
    "actor.optim.adam_beta2": Becomes("actor.adam_beta2"),
    "actor.optim.adam_eps": Becomes("actor.adam_epsilon"),
    "actor.optim.weight_decay": Becomes("actor.weight_decay"),
    "actor.optim.clip_grad": Becomes("actor.clip_grad"),
    "actor.lr_sched.lr_decay_style": Becomes(
        "actor.lr_schedule.decay",
        {style: style for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD")},
        "set it to constant, linear, cosine, inverse-square-root or WSD",
    ),
    "actor.lr_sched.lr_warmup_init": Becomes("actor.lr_schedule.initial"),
    "actor.tokenizer.tokenizer_model": Becomes("model.tokenizer"),
    "rollout.model_dir": Becomes("model.path"),
    "rollout.model.model_path": Becomes("model.path"),
    "rollout.rollout_backend": Becomes(
        "rollout.engine", {"sglang": "sglang"}, "set it to sglang, or leave it out for the embedded engine"
    ),
    "rollout.precision": _ENGINE_PRECISION,
    "rollout.model.precision": _ENGINE_PRECISION,
    "rollout.tensor_parallel_size": OnlyAs((1,), _ONE_ENGINE_A_GPU),
    "rollout.pipeline_parallel_size": OnlyAs((1,), _ONE_ENGINE_A_GPU),
    "rollout.padding": OnlyAs((None,), "set it to null: the tokenizer sets it"),
    "rollout.eos": OnlyAs((None,), "set it to null: the tokenizer sets it"),
    "reward.reward_type": Becomes(
        "rewards", {"math": [{"name": "math_verify"}]}, "math; others are written as rewards"
    ),
    "reward.use_reward_model": OnlyAs((False,), _NO_CRITIC),
    "reward.len_reward_penalty": OnlyAs((None, 0), _LENGTH_PENALTY),
    "reward.safe_length": OnlyAs((None,), _LENGTH_PENALTY),
    "reward.max_length": OnlyAs((None,), _LENGTH_PENALTY),
    "critic.use_critic_model": OnlyAs((False,), _NO_CRITIC),
}

DERIVED = (
    "defaults",
    "cluster.component_placement",
    "cluster.num_nodes",
    "cluster.num_gpus_per_node",
    "cluster.auto_scheduler",
    "cluster.preprocess_threshold",
    "runner.experiment_name",
    "runner.logger.logger_backends",
    "runner.max_epochs",
    "runner.max_steps",
    "runner.save_interval",
    "runner.val_check_interval",
    "runner.seq_length",
    "runner.enable_dynamic_batch_size",
    "runner.max_tokens_per_mbs",
    "algorithm.training_batch_size_per_gpu",
    "algorithm.ratio_clip_eps",
    "algorithm.clip_ratio_low",
    "algorithm.clip_ratio_high",
    "data.train_data_paths",
    "data.val_data_paths",
    "actor.model.tensor_model_parallel_size",
    "actor.model.pipeline_model_parallel_size",
    "actor.model.context_parallel_size",
    "actor.model.expert_model_parallel_size",
    "actor.model.virtual_pipeline_model_parallel_size",
    "actor.lr_sched.lr_warmup_fraction",
    "actor.lr_sched.lr_warmup_iters",
    "actor.lr_sched.lr_decay_iters",
    "actor.lr_sched.min_lr",
    "actor.checkpoint_load_path",
    "actor.model.megatron_checkpoint",
    "actor.megatron.use_hf_ckpt",
    "actor.megatron.use_dist_ckpt",
    "actor.megatron.ckpt_format",
    "actor.megatron.distributed_timeout_minutes",
    "inference.model.tensor_model_parallel_size",
    "inference.model.pipeline_model_parallel_size",
    "reward.reward_scale",
)

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "the scheduler decides when something happens, and looks at no component at intervals": (
        "cluster.monitor_interval",
    ),
    "engines leave by rollout.max_running_requests alone, and their sequences go where the least work remains": (
        "cluster.assign_policy",
        "cluster.migrate_out_max_bs",
    ),
    "cluster.use_pre_process_policy lends the actor's GPUs to the rollout, and the inference keeps its own": (
        "cluster.rollout_use_all_gpus",
    ),
    "groups pass from rollout to inference and actor as they finish, and no component waits for the last one": (
        "cluster.fuse_rollout_inference_only",
    ),
    "communicators are made for each set of members, and those of the last ones are kept": (
        "cluster.recreate_nccl_groups",
    ),
    "they name RLinf's own processes and folders": (
        "hydra.*",
        "actor.group_name",
        "rollout.group_name",
        "inference.group_name",
        "reward.group_name",
        "runner.logger.*",
    ),
    "an evaluation covers all held-out prompts, and has no batches": (
        "algorithm.val_rollout_batch_size_per_gpu",
        "data.val_rollout_batch_size",
    ),
    "Megatron and the engine set memory, kernels and communication here, with the same results": (
        "actor.offload_optimizer",
        "actor.offload_weight",
        "actor.offload_grad",
        "actor.enable_dp_load_balance",
        "actor.model.sequence_parallel",
        "actor.model.recompute_method",
        "actor.model.recompute_num_layers",
        "actor.model.apply_rope_fusion",
        "actor.model.bias_dropout_fusion",
        "actor.model.bias_activation_fusion",
        "actor.model.persist_layer_norm",
        "actor.model.gradient_accumulation_fusion",
        "actor.model.batch_p2p_comm",
        "actor.model.variable_seq_lengths",
        "actor.model.use_cpu_initialization",
        "actor.model.moe_token_dispatcher_type",
        "actor.model.moe_grouped_gemm",
        "actor.optim.use_distributed_optimizer",
        "actor.optim.overlap_grad_reduce",
        "actor.optim.overlap_param_gather",
        "actor.optim.overlap_param_gather_with_optimizer_step",
        "actor.optim.optimizer_enable_pin",
        "actor.megatron.*",
        "actor.fsdp_config.*",
        "inference.model.sequence_parallel",
        "inference.load_from_actor",
        "algorithm.rollout_batch_size_per_gpu",
        "algorithm.logprob_forward_micro_batch_size",
        "rollout.gpu_memory_utilization",
        "rollout.enforce_eager",
        "rollout.distributed_executor_backend",
        "rollout.cuda_graph_max_bs",
        "rollout.sglang.attention_backend",
        "rollout.sglang.use_torch_compile",
        "rollout.sglang.torch_compile_max_bs",
        "rollout.vllm.*",
        "rollout.attention_backend",
        "rollout.use_torch_compile",
        "rollout.torch_compile_max_bs",
        "data.num_workers",
    ),
    "they choose only logs and comparisons": (
        "algorithm.calculate_entropy",
        "actor.calculate_flops",
        "rollout.disable_log_stats",
        "rollout.detokenize",
        "rollout.print_outputs",
        "rollout.validate_weight",
        "rollout.validate_save_dir",
        "rollout.sglang.decode_log_interval",
        "rollout.sglang_decode_log_interval",
        "rollout.return_logprobs",
    ),
    "other keys set it": (
        "rollout.model_arch",
        "rollout.model.model_type",
        "rollout.recompute_logprobs",
        "inference.model_arch",
        "inference.model_type",
        "actor.model.model_type",
        "actor.optim.bf16",
        "actor.optim.fp16",
        "actor.optim.min_lr",
        "actor.optim.loss_scale",
        "actor.optim.loss_scale_window",
        "data.dataset_name",
        "reward.tokenizer.*",
    ),
    "the order of prompts follows from seed": ("data.seed", "data.validation_shuffle"),
    "tokenizers are read from files without running their code": (
        "actor.tokenizer.use_fast",
        "actor.tokenizer.trust_remote_code",
        "actor.tokenizer.padding_side",
    ),
}
"""The keys by reason. A star stands for all keys below."""
