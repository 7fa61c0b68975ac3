"""The section `physics` of a scenario: which law its times follow, and every number of the law.

`roofline`       the times are computed from the model, the GPU and the numbers of this section
`published_fit`  the times are those of the section `costs`: as given, by default fitted to the published timeline

A number is marked P (published), F (fitted to a published figure) or A (assumed).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from simulator.assumptions import Source
from simulator.physics.hardware import GPUS, GpuName, GpuSection, Rate
from simulator.physics.shapes import SHAPES, ModelName, ShapeSection
from tidegate.config.base import NonNegativeFloat, Positive, PositiveFloat, Section

Efficiency = Annotated[float, Field(ge=1e-3, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
_AIC = "F: AIConfigurator's kernel times of SGLang on H100 and H200"


class PhysicsLaw(StrEnum):
    PUBLISHED_FIT = "published_fit"
    ROOFLINE = "roofline"


class DecodePhysics(Section):
    """One engine's decode step and cache (`physics.decode`)."""

    weight_bandwidth_share: Annotated[Efficiency, Source(_AIC)] = 0.88
    kv_bandwidth_share: Annotated[Efficiency, Source(_AIC)] = 0.91
    layer_s: Annotated[NonNegativeFloat, Source(_AIC + ": per layer and step")] = 37e-6
    all_reduce_s: Annotated[NonNegativeFloat, Source(_AIC + ": per layer and step above TP 1")] = 9e-6
    expert_layer_s: Annotated[NonNegativeFloat, Source(_AIC + ": per layer with experts and step")] = 8e-6
    arithmetic_share: Annotated[
        Share, Source(_AIC + ": the part of a sequence's arithmetic that the reading of weights does not hide")
    ] = 0.64
    sampling_s: Annotated[NonNegativeFloat, Source(_AIC + ": per sequence")] = 1.9e-6
    host_s: Annotated[NonNegativeFloat, Source("F: 7.14 ms of Qwen3-8B on an H100, whose kernels take 6.8 ms")] = 0.4e-3
    spread_experts_from_gpus: Annotated[
        Positive, Source("A: an engine of so many GPUs spreads whole experts, and its busiest GPU sets the time")
    ] = 8
    spread_experts_imbalance: Annotated[
        float, Field(ge=1, le=100), Source("F: AIConfigurator's TP 8 with EP 8 of Qwen3-235B-A22B")
    ] = 1.55
    memory_share: Annotated[
        Efficiency, Source("P: mem_fraction_static 0.85; engines beside a trainer have 0.4 to 0.7")
    ] = 0.85
    prefill_efficiency: Annotated[Efficiency, Source("F: AIConfigurator: 0.61 for 32B, 0.69 for 7B")] = 0.65
    expert_prefill_efficiency: Annotated[Efficiency, Source("F: AIConfigurator, Qwen3-30B-A3B at 4k: 41k tokens/s")] = (
        0.30
    )


class TrainerPhysics(Section):
    """The trainer's passes and updates, and those of the inference (`physics.trainer`)."""

    kernel_efficiency: Annotated[
        Efficiency, Source("F: RLinf's 5.3k tokens/s a GPU of 7B on 64 H100; AReaL reaches 0.39 to 0.46 well packed")
    ] = 0.46
    expert_kernel_efficiency: Annotated[
        Efficiency, Source("A: between Megatron-Bridge's 5.3k and RLinf's 1.6k tokens/s a GPU of Qwen3-30B-A3B")
    ] = 0.12
    recompute: Annotated[bool, Source("A: all activations of the layers are computed again")] = True
    micro_batch_tokens: Annotated[Positive, Source("P: AReaL packs 32,768 tokens a micro-batch")] = 32_768
    layer_pass_s: Annotated[NonNegativeFloat, Source("A: launches of a layer's kernels in one micro-batch")] = 0.3e-3
    straggler_micro_batches: Annotated[
        NonNegativeFloat, Source("A: micro-batches of an update by which the busiest replica is above the mean")
    ] = 1.0
    link_efficiency: Annotated[Efficiency, Source("A: of NVLink and of the network")] = 0.75
    exposed_tp_share: Annotated[Share, Source("A: of tensor and expert parallel transfers; the rest overlaps")] = 0.7
    exposed_dp_share: Annotated[Share, Source("A: of the gradients' and weights' transfers; the rest overlaps")] = 0.5
    update_s: Annotated[
        NonNegativeFloat, Source("F: RLinf's 7B falls from 5.3k to 4.0k tokens/s a GPU from 64 to 256 GPUs")
    ] = 6.0
    inference_efficiency: Annotated[
        Efficiency, Source("F: RLinf's log-probabilities of 7B on 64 H100, 19.2k tokens/s a GPU")
    ] = 0.35


class MemoryPhysics(Section):
    """What the trainer keeps on a GPU (`physics.memory`)."""

    weight_bytes: Annotated[PositiveFloat, Source("P: Megatron: bf16 parameters and fp32 gradients, per parameter")] = (
        6.0
    )
    optimizer_bytes: Annotated[
        PositiveFloat, Source("P: Megatron's distributed optimizer, per parameter, over the replicas")
    ] = 12.0
    recomputed_bytes: Annotated[
        PositiveFloat, Source("P: arXiv 2205.05198: full recompute keeps a layer's input; per token and hidden unit")
    ] = 2.0
    layer_bytes: Annotated[
        PositiveFloat, Source("P: arXiv 2205.05198: all activations of a layer; per token and hidden unit")
    ] = 34.0
    logit_bytes: Annotated[PositiveFloat, Source("P: verl: per token and word of the vocabulary, with the entropy")] = (
        7.0
    )
    logit_tokens: Annotated[Positive, Source("A: the tokens whose logits are kept at a time, one chunk of them")] = 8192
    reserved_bytes: Annotated[NonNegativeFloat, Source("A: CUDA, NCCL's buffers and fragments of the allocator")] = 6e9


class MovePhysics(Section):
    """Switches and the sync of weights (`physics.moves`). A duration that the section `costs` sets counts instead."""

    sleep_s: Annotated[NonNegativeFloat, Source("F: DynaRL's moves of the rollout, 3.6 to 4.0 s")] = 2.0
    wake_s: Annotated[NonNegativeFloat, Source("F: the same; vLLM wakes a 30B engine in 2.9 s")] = 1.5
    host_bytes_per_s: Annotated[Rate, Source("A: PCIe 5 between a GPU and its host")] = 45e9
    cold_s: Annotated[NonNegativeFloat, Source("F: vLLM's cold starts: 47 s for 30B, 98 s for 235B")] = 29.0
    disk_bytes_per_s: Annotated[Rate, Source("F: the same")] = 3.4e9
    trainer_wake_s: Annotated[NonNegativeFloat, Source("P: RollMux, a warm trainer in 4.1 to 5.9 s")] = 4.5
    publish_s: Annotated[NonNegativeFloat, Source("F: verl's delta_weight_sync.md: 5.5 to 6.0 s for 7B")] = 3.5
    publish_bytes_per_s: Annotated[Rate, Source("F: the same, 14 to 18 s for 32B; per node of the copy that sends")] = (
        8.5e9
    )


class PhysicsSection(Section):
    """`shape` and `gpu` replace what `model` and `hardware` name."""

    law: PhysicsLaw = PhysicsLaw.ROOFLINE
    model: ModelName = ModelName.QWEN25_7B
    hardware: GpuName = GpuName.H100
    shape: ShapeSection | None = None
    gpu: GpuSection | None = None
    decode: DecodePhysics = DecodePhysics()
    trainer: TrainerPhysics = TrainerPhysics()
    memory: MemoryPhysics = MemoryPhysics()
    moves: MovePhysics = MovePhysics()

    def named_shape(self) -> ShapeSection:
        return self.shape or SHAPES[self.model]

    def named_gpu(self) -> GpuSection:
        return self.gpu or GPUS[self.hardware]
