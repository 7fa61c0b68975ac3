"""Tidegate's keys that follow from several keys of RLinf's: GPUs, layouts, iterations, evaluation and others.

This step follows the translation of the keys with a rule of their own, and uses its results.

Invariant: an unknown number, such as the GPUs behind `all`, is asked for and not guessed.
[test_rlinf: an_impossible_placement_is_refused]
"""

from __future__ import annotations

import math
import re
from typing import Any

from tidegate.config.base import MAX_GPUS
from tidegate.config.gpu_lists import gpu_indices
from tidegate.rlinf.micro_batches import micro_batches
from tidegate.rlinf.rules import DERIVED, SAME_AS
from tidegate.rlinf.scheduler import scheduler
from tidegate.rlinf.translation import MISSING, Translation

_COMPONENTS = ("actor", "rollout", "inference")
_PLACEMENT = "cluster.component_placement"
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_NO_NAME = re.compile(r"[^a-z0-9]+")
_LONGEST_NAME = 48


def derive(config: Translation) -> None:
    """Derive all keys. The placement comes first: nodes and layouts follow from it."""
    _composition(config)
    placement = _placement(config)
    _nodes(config, placement)
    for role in ("actor", "inference"):
        _layout(config, role, placement.get(role))
    scheduler(config)
    _job(config)
    _trackers(config)
    _iterations(config)
    _clipping(config)
    micro_batches(config)
    _decay(config, _warm_up(config))
    _one_path(config, "data.train_data_paths", "data.train")
    _evaluation(config)
    _weights(config)
    _reward_scale(config)
    _lengths(config)
    _repeated_keys(config)


def _composition(config: Translation) -> None:
    """Refuse Hydra's list of files to compose. Hydra's own files in it do not concern a job."""
    listed = config.take("defaults")
    items = listed if isinstance(listed, list) else [] if listed is MISSING else [listed]
    if other := [item for item in items if "hydra/" not in str(item) and item != "_self_"]:
        fault = "files are not composed by a list in one of them: name them all, tidegate run A.yaml B.yaml"
        config.refuse("defaults", f"defaults={other!r}: {fault}")
    elif items:
        config.add_note("without effect here: these files are Hydra's own", "defaults")


def _placement(config: Translation) -> dict[str, list[int]]:
    """The GPUs of each component, with `all` and `actor,rollout` written out. A component with a fault is left out."""
    given = config.now(_PLACEMENT)
    if not isinstance(given, dict):
        return {}
    found: dict[str, list[int]] = {}
    for names, where in given.items():
        key = f"{_PLACEMENT}.{names}"
        components = [name.strip() for name in str(names).split(",")]
        indices = _indices(config, key, where)
        for name in components:
            if name in _COMPONENTS and indices is not None:
                found[name] = indices
        if components != [names] or names not in _COMPONENTS or where == "all":
            config.take(key)
            _write_out(config, key, components, where, indices)
    return found


def _write_out(config: Translation, key: str, components: list[str], where: Any, indices: list[int] | None) -> None:
    for name in components:
        if name == "reward":
            config.add_note("rewards are computed in processes beside the rollout's lead, without a GPU", key)
        elif name not in _COMPONENTS:
            config.refuse(key, f"{key}: there is no component {name!r}; leave it out (known: {', '.join(_COMPONENTS)})")
        elif indices is not None:
            text = f"{indices[0]}-{indices[-1]}" if where == "all" else where
            config.put(f"{_PLACEMENT}.{name}", text, key)


def _indices(config: Translation, key: str, where: Any) -> list[int] | None:
    """The GPUs of a placement. None: they are unknown. A text that is no list of GPUs is left to the later check."""
    if isinstance(where, dict):
        config.refuse(key, f"{key}: groups of nodes are not known; list GPUs counted over the nodes, such as 0-3")
        return None
    if isinstance(where, str) and ":" in where:
        config.refuse(key, f"{key}={where}: a GPU has one process; list GPUs only, such as {where.partition(':')[0]}")
        return None
    if where == "all":
        count = _num_gpus(config)
        if count is None and not key.endswith(".reward"):
            config.refuse(key, f"{key}=all: the number of GPUs is unknown; give cluster.nodes, such as {{n0: 8}}")
        if count is not None and count > MAX_GPUS:
            config.refuse(key, f"{key}=all: {count:,} GPUs are more than the {MAX_GPUS:,} that a cluster may have")
            return None
        return list(range(count)) if count else None
    try:
        return gpu_indices(str(where))
    except ValueError:
        return None


def _num_gpus(config: Translation) -> int | None:
    nodes = config.now("cluster.nodes")
    if isinstance(nodes, dict):
        return sum(count for count in nodes.values() if isinstance(count, int))
    count, each = config.now("cluster.num_nodes"), config.now("cluster.num_gpus_per_node")
    return count * each if isinstance(count, int) and isinstance(each, int) else None


def _nodes(config: Translation, placement: dict[str, list[int]]) -> None:
    count, each = config.take("cluster.num_nodes"), config.take("cluster.num_gpus_per_node")
    if count is MISSING or config.now("cluster.nodes") is not MISSING:
        return
    if not (isinstance(count, int) and 0 < count <= MAX_GPUS):
        fault = f"cluster.num_nodes={count!r} must be a number from 1 to {MAX_GPUS:,}: each node has at least one GPU"
        config.refuse("cluster.num_nodes", fault)
        return
    if each is MISSING:
        named = 1 + max((index for indices in placement.values() for index in indices), default=-1)
        if not named or named % count:
            config.refuse(
                "cluster.num_nodes",
                f"cluster.num_nodes={count}: the number of GPUs a node is unknown, and the {named} GPUs that "
                f"{_PLACEMENT} reaches do not divide by it; give cluster.nodes, such as {{n0: 8, n1: 8}}",
            )
            return
        each = named // count
        config.add_note(
            f"each node is assumed to have {each} GPUs, since {_PLACEMENT} reaches so far; cluster.nodes sets it",
            "cluster.num_nodes",
        )
    config.put("cluster.nodes", {f"n{index}": each for index in range(count)}, "cluster.num_nodes")


def _layout(config: Translation, role: str, indices: list[int] | None) -> None:
    """RLinf derives the data-parallel size from the number of GPUs."""
    for axis, name in _AXES.items():
        key = f"{role}.model.{name}"
        value = config.take(key) if key in DERIVED else MISSING
        # RLinf writes null where a stage is one piece.
        if value is not MISSING and value is not None:
            config.put(f"{role}.layout.{axis}", value, key)
    if indices is None or config.now(f"{role}.layout.dp") is not MISSING:
        return
    sizes = [config.now(f"{role}.layout.{axis}") for axis in ("tp", "pp", "cp")]
    model_ranks = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
    config.put(f"{role}.layout.dp", max(1, len(indices) // model_ranks), _PLACEMENT)


def _job(config: Translation) -> None:
    name = config.take("runner.experiment_name")
    if name is MISSING:
        return
    job = _NO_NAME.sub("-", str(name).lower()).strip("-")[:_LONGEST_NAME].strip("-")
    if job != name and config.now("job") is MISSING:
        config.add_note(f"the job is named {job}: a name has only a-z, 0-9 and inner dashes", "runner.experiment_name")
    config.put("job", job, "runner.experiment_name")


def _trackers(config: Translation) -> None:
    key = "runner.logger.logger_backends"
    names = config.take(key)
    if names is MISSING or names is None:
        return
    for name in names if isinstance(names, list) else [names]:
        match name:
            case "tensorboard":
                config.put("tracking.tensorboard", True, key)
            case "wandb":
                config.put("tracking.wandb.mode", "online", key)
            case _:
                config.refuse(key, f"{key} names {name!r}: the known ones are tensorboard and wandb")


def _iterations(config: Translation) -> None:
    steps, epochs = config.take("runner.max_steps"), config.take("runner.max_epochs")
    if isinstance(steps, int) and steps > 0:
        config.put("algorithm.iterations", steps, "runner.max_steps")
        if epochs is not MISSING:
            config.add_note("the data is read as often as runner.max_steps needs", "runner.max_epochs")
    elif config.now("algorithm.iterations") is MISSING and (steps, epochs) != (MISSING, MISSING):
        source, value = ("runner.max_epochs", epochs) if steps is MISSING else ("runner.max_steps", steps)
        config.refuse(source, f"{source}={value}: a job needs its number of iterations: set runner.max_steps to it")
    _checkpoints(config)


def _checkpoints(config: Translation) -> None:
    key = "runner.save_interval"
    every, last = config.take(key), config.now("algorithm.iterations")
    if isinstance(every, int) and every > 0:
        config.put("checkpoint.every", every, key)
    elif every is not MISSING and isinstance(last, int):
        config.put("checkpoint.every", last, key)
        config.add_note("the last iteration has a checkpoint all the same", key)


def _clipping(config: Translation) -> None:
    """`clip_ratio_low` and `clip_ratio_high` take precedence over `ratio_clip_eps`, unless they are null."""
    eps_key = "algorithm.ratio_clip_eps"
    eps = config.take(eps_key)
    for side in ("low", "high"):
        key = f"algorithm.clip_ratio_{side}"
        value = config.take(key)
        if value is not MISSING and value is not None:
            config.put(f"algorithm.clip_{side}", value, key)
        elif eps is not MISSING:
            config.put(f"algorithm.clip_{side}", eps, eps_key)


def _warm_up(config: Translation) -> Any:
    """Translate the warm-up. Megatron counts it in updates or as a share of `lr_decay_iters`; Tidegate in samples.

    Returns `lr_decay_iters`."""
    schedule = "actor.lr_sched"
    share, updates, decay = (
        config.take(f"{schedule}.{name}") for name in ("lr_warmup_fraction", "lr_warmup_iters", "lr_decay_iters")
    )
    source = f"{schedule}.lr_warmup_fraction"
    if share is MISSING or share is None:
        share, source = None, f"{schedule}.lr_warmup_iters"
    elif not isinstance(decay, int):
        config.refuse(source, f"{source}={share}: the number of updates is unknown; set {schedule}.lr_decay_iters")
        return decay
    count = updates if share is None else share * decay
    if not isinstance(count, int | float) or count == 0:
        return decay
    names = ("prompts_per_iteration", "group_size", "n_minibatches")
    sizes = [config.now(f"algorithm.{name}") for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        config.refuse(source, f"{source} counts updates: their samples need {', '.join(names)} of algorithm; set them")
        return decay
    prompts, group, minibatches = sizes
    config.put("actor.lr_warm_up_samples", round(count * prompts * group / minibatches), source)
    return decay


def _decay(config: Translation, budget: Any) -> None:
    """Translate the decay. A constant rate has no budget and no minimum."""
    key = "actor.lr_sched.min_lr"
    minimum = config.take(key)
    if config.now("actor.lr_schedule.decay") in (MISSING, "constant"):
        if minimum is not MISSING:
            config.add_note("without effect here: the rate stays after its warm-up", key)
        return
    if minimum is not MISSING:
        config.put("actor.lr_schedule.minimum", minimum, key)
    if budget is not MISSING and budget is not None:
        config.put("actor.lr_schedule.budget_updates", budget, "actor.lr_sched.lr_decay_iters")


def _one_path(config: Translation, key: str, ours: str) -> None:
    paths = config.take(key)
    if isinstance(paths, str):
        paths = [paths]
    if paths is MISSING:
        return
    if not isinstance(paths, list) or len(paths) != 1:
        config.refuse(key, f"{key} must be one path: put several files into a folder and name that ({ours})")
        return
    config.put(ours, paths[0], key)


def _evaluation(config: Translation) -> None:
    """Translate the evaluation. RLinf's configs name held-out data even where the interval -1 turns evaluation off."""
    every_key, data_key = "runner.val_check_interval", "data.val_data_paths"
    every = config.take(every_key)
    if every is not MISSING and every is not None and (isinstance(every, bool) or not isinstance(every, int)):
        config.refuse(every_key, f"{every_key}={every!r} must be a number of iterations, or -1 for no evaluation")
    elif isinstance(every, int) and every > 0:
        config.put("evaluation.every", every, every_key)
        config.add_note("the weights before the first iteration are evaluated too; see evaluation", every_key)
    elif every is not MISSING:
        config.add_note("turns evaluation off; evaluation.every turns it on", every_key)
    if config.now("evaluation.every") is not MISSING:
        _one_path(config, data_key, "evaluation.data")
    elif config.take(data_key) is not MISSING:
        config.add_note("without effect here: evaluation is off", data_key)


def _weights(config: Translation) -> None:
    """Translate the weights: a named folder of Megatron's, else `model.path`, which `use_hf_ckpt` selects in RLinf."""
    megatron = "actor.megatron"
    is_hugging_face = config.take(f"{megatron}.use_hf_ckpt")
    formats = {key: config.take(key) for key in (f"{megatron}.use_dist_ckpt", f"{megatron}.ckpt_format")}
    named = {key: config.take(key) for key in ("actor.checkpoint_load_path", "actor.model.megatron_checkpoint")}
    folders = {key: folder for key, folder in named.items() if folder not in (MISSING, None)}
    for key, folder in folders.items():
        if True in formats.values() or "torch_dist" in formats.values():
            config.put("model.torch_dist", folder, key)
        else:
            remedy = f"set it to null and {megatron}.use_hf_ckpt to true, for weights from rollout.model.model_path"
            config.refuse(
                key, f"{key}={folder}: the only Megatron format that is read is torch_dist (ckpt_format); {remedy}"
            )
    for key in (key for key, value in formats.items() if value is not MISSING and not folders):
        config.add_note("without effect here: no folder of Megatron's weights is named", key)
    if is_hugging_face is False and not folders:
        key = f"{megatron}.use_hf_ckpt"
        config.refuse(key, f"{key}=False: no weights are named; set it to true, for those of rollout.model.model_path")


def _reward_scale(config: Translation) -> None:
    key = "reward.reward_scale"
    scale = config.take(key)
    if scale is MISSING:
        return
    if config.now("algorithm.normalize_std") is False:
        remedy = "leave it out and set the weights of rewards; an answer earns the scale or its negative in RLinf"
        config.refuse(key, f"{key}={scale} has an effect where algorithm.normalize_std is false: {remedy}")
    else:
        config.add_note("without effect here: the division by the standard deviation of advantages cancels it", key)


def _lengths(config: Translation) -> None:
    length, minutes_key = config.take("runner.seq_length"), "actor.megatron.distributed_timeout_minutes"
    if length is not MISSING:
        config.put("model.max_seq_len", length, "runner.seq_length")
    minutes = config.take(minutes_key)
    if isinstance(minutes, int | float):
        config.put("runtime.collective_timeout_s", 60 * minutes, minutes_key)


def _repeated_keys(config: Translation) -> None:
    for key, ours in SAME_AS.items():
        value, meant = config.take(key), config.now(ours)
        if value is not MISSING and meant is not MISSING and value != meant:
            config.refuse(key, f"{key}={value} and {ours}={meant} stand for one number: leave the first out")
