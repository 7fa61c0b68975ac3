"""The memory of a GPU by what it holds, and which layouts and engines fit. Pure.

Of the trainer, for each GPU:

    state        (6 + 12 / (dp * cp)) * parameters of the rank       experts: 12 / (dp * cp / ep)
    activations  tokens / (tp * cp) * hidden * (2 * layers + 34)     with recompute; else 34 * layers
    logits       tokens of a chunk / tp * vocabulary * 7
    reserved     6 GB

tokens are those of one micro-batch of a replica, which holds the longest sequence at least. With a pipeline the first
stage keeps one micro-batch for each stage, so its layers count as all layers. The stage with most has one table of
embeddings; without a pipeline one stage has both.

Of an engine of n GPUs: memory_share * memory - weights / n is left for the cache. Keys and values divide over the KV
heads at most. A copy of the inference has the fewest GPUs, a power of two, whose memory_share holds the weights.

Invariants:
- A layout fits more replicas where it fits fewer. [test_room: more_replicas_never_need_more]
- A refusal has every term and a remedy. [test_room: a_layout_that_does_not_fit]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.physics.hardware import GpuSection
from simulator.physics.sections import DecodePhysics, MemoryPhysics, PhysicsSection, TrainerPhysics
from simulator.physics.shapes import WEIGHT_BYTES, ShapeSection
from tidegate.types import Layout

_GB = 1e9


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of the GPU that holds the most."""

    state: float
    activations: float
    logits: float
    reserved: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.logits + self.reserved

    def __str__(self) -> str:
        return (
            f"{self.total / _GB:.1f} GB: {self.state / _GB:.1f} of state, {self.activations / _GB:.1f} of activations, "
            f"{self.logits / _GB:.1f} of logits and {self.reserved / _GB:.1f} reserved"
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """`longest_tokens`: the tokens of the longest sequence that the job may train."""

    physics: MemoryPhysics
    trainer: TrainerPhysics
    decode: DecodePhysics
    shape: ShapeSection
    gpu: GpuSection
    longest_tokens: int

    @classmethod
    def of(cls, physics: PhysicsSection, *, longest_tokens: int) -> Memory:
        return cls(
            physics.memory,
            physics.trainer,
            physics.decode,
            physics.named_shape(),
            physics.named_gpu(),
            longest_tokens,
        )

    def of_trainer(self, layout: Layout) -> TrainerMemory:
        own, shape = self.physics, self.shape
        tokens = max(self.trainer.micro_batch_tokens * layout.cp, self.longest_tokens) / (layout.tp * layout.cp)
        kept = own.recomputed_bytes * shape.num_layers + own.layer_bytes
        per_unit = kept if self.trainer.recompute else own.layer_bytes * shape.num_layers
        return TrainerMemory(
            state=self._state(layout, own.optimizer_bytes, own.weight_bytes),
            activations=tokens * shape.hidden_size * per_unit,
            logits=min(tokens * layout.tp, own.logit_tokens) / layout.tp * shape.vocab_size * own.logit_bytes,
            reserved=own.reserved_bytes,
        )

    def fits(self, layout: Layout) -> bool:
        return self.of_trainer(layout).total <= self.gpu.memory_bytes

    def fewest_copies(self, layout: Layout, *, most: int) -> int | None:
        """The smallest legal dp with which copies like those of the layout fit. None: not even `most` copies fit."""
        for dp in range(1, most + 1):
            if dp * layout.cp % layout.ep == 0 and self.fits(replace(layout, dp=dp)):
                return dp
        return None

    def refusal(self, layout: Layout) -> str:
        """Why the trainer cannot have the layout. Empty: it fits."""
        needs = self.of_trainer(layout)
        if needs.total <= self.gpu.memory_bytes:
            return ""
        return (
            f"layout {layout} needs {needs} a GPU, which has {self.gpu.memory_bytes / _GB:.1f}: raise tp, pp or dp, or "
            "lower physics.trainer.micro_batch_tokens"
        )

    def cache_tokens(self, num_gpus: int) -> int:
        """The tokens in the KV cache of an engine. Negative: the weights do not fit."""
        room = self.decode.memory_share * self.gpu.memory_bytes - self.shape.weight_bytes / num_gpus
        return int(room / (self.shape.kv_bytes / self.kv_parts(num_gpus)))

    def kv_parts(self, num_gpus: int) -> int:
        """Over how many GPUs the keys and values of a token divide."""
        return min(num_gpus, self.shape.num_kv_heads)

    def inference_copy_gpus(self) -> int:
        num_gpus = 1
        while self.shape.weight_bytes / num_gpus > self.decode.memory_share * self.gpu.memory_bytes:
            num_gpus *= 2
        return num_gpus

    def kept_bytes(self, layout: Layout) -> float:
        """Of a rank: its bf16 weights and its part of the optimizer, which a trainer that waits keeps on its host."""
        return self._state(layout, self.physics.optimizer_bytes, WEIGHT_BYTES)

    def engine_refusal(self, num_gpus: int) -> str:
        """Why an engine of so many GPUs cannot serve the model. Empty: it can."""
        room = self.cache_tokens(num_gpus)
        if room >= self.longest_tokens:
            return ""
        share = self.decode.memory_share * self.gpu.memory_bytes / _GB
        return (
            f"an engine of costs.engine.gpus_per_engine={num_gpus} has {share:.1f} GB a GPU for weights of "
            f"{self.shape.weight_bytes / num_gpus / _GB:.1f} GB, which leaves its cache {max(0, room):,} tokens for a "
            f"sequence of {self.longest_tokens:,}: raise gpus_per_engine or physics.decode.memory_share"
        )

    def _state(self, layout: Layout, optimizer_bytes: float, weight_bytes: float) -> float:
        """The optimizer's bytes divide over the replicas of a parameter, those of the weights do not."""
        replicas = layout.dp * layout.cp
        dense, experts = self._rank_parameters(layout)
        of_dense = (weight_bytes + optimizer_bytes / replicas) * dense
        return of_dense + (weight_bytes + optimizer_bytes * layout.ep / replicas) * experts

    def _rank_parameters(self, layout: Layout) -> tuple[float, float]:
        """Without and with experts, of the rank with the most."""
        shape, cut = self.shape, layout.tp * layout.pp
        tables = shape.num_parameters - shape.dense_parameters - shape.expert_parameters
        if layout.pp > 1:
            tables = shape.embedding_parameters
        return shape.dense_parameters / cut + tables / layout.tp, shape.expert_parameters / cut / layout.ep
