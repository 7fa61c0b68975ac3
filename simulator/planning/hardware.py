"""A job's config and a GPU's name -> the basis of a forecast whose times are computed (`physics.law: roofline`).

- The shape is the job's own model: the config's `model`, or its checkpoint.
- `actor.recompute: full` and `actor.max_tokens_per_microbatch` are the trainer's. Without the second a micro-batch has
  the tokens of the physics' default.
- Memory counts weights in the config's precision. Times are those of bf16.
- Of `assumptions.costs` only the times of moves count, and only those that the config sets.

Invariants:
- What has no room is refused with its numbers before anything runs. [test_hardware: a_layout_without_room]
- Each key of the config that does not count is named. [test_hardware: keys_that_do_not_count]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from simulator.cost_model import Costs
from simulator.job_scenario import COST_KEYS, PredictionBasis, assumed_lengths, assumed_prompt_tokens
from simulator.physics.hardware import GpuName
from simulator.physics.memory import Memory
from simulator.physics.sections import MemoryPhysics, PhysicsLaw, PhysicsSection, TrainerPhysics
from simulator.physics.shapes import ShapeSection
from simulator.scenario import ScenarioError
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.model_config import ModelConfig
from tidegate.types import Precision

_FP32_BYTES = MemoryPhysics(weight_bytes=8.0, optimizer_bytes=8.0)
"""Of a parameter in fp32: the weight and the gradient; Adam's two moments. There is no main parameter beside it."""


def gpu_named(text: str) -> GpuName:
    """ConfigError: the physics have no such GPU."""
    try:
        return GpuName(text)
    except ValueError as error:
        known = [each.value for each in GpuName]
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ConfigError(
            f"--hardware {text!r} is no known GPU{hint} (known: {', '.join(known)}): name one of them, or leave it "
            "out for the config's assumptions"
        ) from error


def shape_of(model: ModelConfig, padded_vocab: int) -> ShapeSection:
    """The model's shape; its tables have the padding rows that the trainer gives them."""
    given = {name: getattr(model, name) for name in ShapeSection.model_fields}
    experts = {"num_experts": model.num_experts or 0, "experts_per_token": model.experts_per_token or 0}
    return ShapeSection.model_validate(given | experts | {"vocab_size": padded_vocab})


def memory_of_job(config: JobConfig, shape: ShapeSection, gpu: GpuName, prompt_tokens: int | None) -> Memory:
    """`prompt_tokens`: of a mean prompt; None: assumed."""
    prompt = assumed_prompt_tokens(config) if prompt_tokens is None else prompt_tokens
    return Memory.of(_physics(config, shape, gpu), longest_tokens=prompt + config.algorithm.max_new_tokens)


def basis_of_hardware(
    config: JobConfig, shape: ShapeSection, gpu: GpuName, *, prompt_tokens: int | None
) -> PredictionBasis:
    """ScenarioError: an engine has no room for the model, or the job has a pace."""
    if config.cluster.pace is not None:
        raise ScenarioError(f"--hardware {gpu} and cluster.pace are two laws of all times: leave one of them out")
    _check_engine(memory_of_job(config, shape, gpu, prompt_tokens), gpu)
    assumed = config.assumptions.costs
    moves = {
        name: getattr(assumed, own)
        for (section, name), own in COST_KEYS.items()
        if section == "switch" and own in assumed.model_fields_set
    }
    engine = {"gpus_per_engine": 1, "max_running": config.rollout.max_running_requests}
    return PredictionBasis(
        Costs.model_validate({"engine": engine} | ({"switch": moves} if moves else {})),
        assumed_lengths(config),
        model=None,
        model_source=f"the job's model, on {gpu}",
        is_calibrated=False,
        prompt_tokens=prompt_tokens,
        physics=_physics(config, shape, gpu),
    )


def notes(config: JobConfig) -> Iterator[str]:
    """What a reader has to know of a computed forecast."""
    if config.actor.precision is Precision.FP32:
        yield "times are those of bf16, and actor.precision is fp32"
    if config.actor.max_tokens_per_microbatch is None:
        tokens = TrainerPhysics().micro_batch_tokens
        yield f"a micro-batch has {tokens:,} tokens: the config sets no actor.max_tokens_per_microbatch"
    used = {own for (section, _), own in COST_KEYS.items() if section == "switch"}
    idle = sorted(config.assumptions.costs.model_fields_set - used)
    if idle:
        yield f"not used, for the physics compute them: {', '.join(f'assumptions.costs.{name}' for name in idle)}"


def _physics(config: JobConfig, shape: ShapeSection, gpu: GpuName) -> PhysicsSection:
    actor = config.actor
    trainer = TrainerPhysics(recompute=actor.recompute == "full")
    if actor.max_tokens_per_microbatch is not None:
        trainer = trainer.model_copy(update={"micro_batch_tokens": actor.max_tokens_per_microbatch})
    memory = _FP32_BYTES if actor.precision is Precision.FP32 else MemoryPhysics()
    return PhysicsSection(law=PhysicsLaw.ROOFLINE, hardware=gpu, shape=shape, trainer=trainer, memory=memory)


def _check_engine(memory: Memory, gpu: GpuName) -> None:
    if memory.cache_tokens(1) >= memory.longest_tokens:
        return
    room = memory.decode.memory_share * memory.gpu.memory_bytes / 1e9
    raise ScenarioError(
        f"--hardware {gpu}: an engine of a job has one GPU, with {room:.1f} GB for weights of "
        f"{memory.shape.weight_bytes / 1e9:.1f} GB and {memory.longest_tokens:,} cached tokens of "
        f"{memory.shape.kv_bytes / 1e3:.0f} kB each: name a GPU with more memory, lower algorithm.max_new_tokens, or "
        "take a smaller model"
    )
