"""The trainer's time, from the arithmetic of its passes. Pure.

A token of a sequence with mean context c (the sum of squared lengths over the sum of lengths) takes

    flops(c) = 6 * active parameters + 6 * layers * heads * head_dim * c          a third of it again with recompute

The input's table does no arithmetic. A data-parallel replica of tp * pp * cp GPUs spends on a token

    replica_s = flops / (tp * pp * cp * peak * kernel_efficiency)
              + exposed all-reduces over tp + gathered keys and values over cp + exchanged tokens over ep
              + layers / pp * layer_pass_s / tokens of a micro-batch
    token_s   = replica_s / dp * (1 + ((pp - 1) / vpp + straggler * (1 - 1 / dp)) / m)
    m         = the replica's micro-batches of an update

and an update besides

    update_s + exposed bytes of gradients (fp32) and weights (bf16) / rate of the link

So more replicas have fewer micro-batches each: bubbles, stragglers and updates weigh more, and the speed-up of a
doubling falls. The size of an update is the expected one. The flops of a portion are those of its own lengths.

Invariants:
- Twice the replicas are faster, and never twice as fast. [test_trainer_law: saturates]
- The seconds of portions add up to those of all their tokens. [test_trainer_law: the_portions_add_up]
- No layout has more tokens a second than `most_rate`. [test_trainer_law: no_layout_is_faster]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from simulator.physics.hardware import GpuSection
from simulator.physics.sections import TrainerPhysics
from simulator.physics.shapes import WEIGHT_BYTES, ShapeSection
from tidegate.types import Layout

GRADIENT_BYTES = 4
"""Of a parameter: Megatron reduces gradients of bf16 models in fp32."""
_FORWARD, _BACKWARD = 1, 2
"""The passes over a token, in forward passes."""


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """What earlier iterations would have shown of the work of one. Lengths count prompts and observations."""

    update_tokens: float
    """The tokens of a minibatch."""
    mean_tokens: float
    """Of a sequence."""
    context_tokens: float
    """The sum of squared lengths over the sum of lengths."""


@dataclass(frozen=True, slots=True)
class RooflineTrainer:
    """`layouts` are those that the trainer may have, at least one."""

    physics: TrainerPhysics
    shape: ShapeSection
    gpu: GpuSection
    work: ExpectedWork
    layouts: tuple[Layout, ...]
    _seconds: dict[Layout, float] = field(default_factory=dict, repr=False, compare=False)

    def tokens_s(self, num_tokens: float, layout: Layout) -> float:
        """The seconds of tokens with the expected context, evenly shared by the replicas."""
        if layout not in self._seconds:
            self._seconds[layout] = self._token_s(layout)
        return num_tokens * self._seconds[layout]

    def length_factor(self, lengths: Sequence[int]) -> float:
        """The flops of sequences of these lengths, over those of as many tokens with the expected context."""
        context = sum(length * length for length in lengths) / sum(lengths)
        return self.flops(context) / self.flops(self.work.context_tokens)

    def update_s(self, layout: Layout) -> float:
        """The seconds of an update that do not depend on its tokens."""
        replicas = layout.dp * layout.cp
        moved = (replicas - 1) / replicas * (GRADIENT_BYTES + WEIGHT_BYTES) * self._rank_parameters(layout)
        seconds = moved / self._link(layout.num_ranks)
        return self.physics.update_s + self.physics.exposed_dp_share * seconds

    def has_own_rate(self, layout: Layout) -> bool:
        """Every layout has."""
        return True

    def most_rate(self, num_gpus: float) -> float:
        """Tokens a second that no layout on so many GPUs exceeds."""
        return num_gpus / min(self.tokens_s(1.0, layout) * layout.num_ranks for layout in self.layouts)

    @property
    def exponent(self) -> float:
        """The power of the GPUs in `most_rate`."""
        return 1.0

    @property
    def least_update_s(self) -> float:
        return min(map(self.update_s, self.layouts))

    @property
    def inference_tokens_per_s(self) -> float:
        """Tokens a second of one GPU that computes log-probabilities: one forward pass."""
        flops = self._linear_flops() + self._attention_flops(self.work.context_tokens)
        efficiency = self.physics.inference_efficiency
        if self.shape.num_experts:
            efficiency *= self.physics.expert_kernel_efficiency / self.physics.kernel_efficiency
        return self.gpu.flops_per_s * efficiency / flops

    def mfu(self, layout: Layout) -> float:
        """The share of the peak that 6 flops a parameter and token are, as publications count it. Updates count."""
        seconds = self.tokens_s(self.work.update_tokens, layout) + self.update_s(layout)
        return 6 * self.shape.active_parameters * self.work.update_tokens / seconds / self._peak(layout)

    def flops(self, context: float) -> float:
        """Of all passes over a token, recomputed ones included."""
        passes = _FORWARD + _BACKWARD + self.physics.recompute * _FORWARD
        return passes * (self._linear_flops() + self._attention_flops(context))

    def _linear_flops(self) -> float:
        """Of a forward pass over a token, without attention. A tied table computes the output."""
        shape = self.shape
        return 2.0 * (shape.dense_parameters + shape.active_expert_parameters + shape.embedding_parameters)

    def _attention_flops(self, context: float) -> float:
        """Two products of a query with half of the context on average, two flops each: the mask is causal."""
        return 2.0 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim * context

    def _peak(self, layout: Layout) -> float:
        return layout.num_ranks * self.gpu.flops_per_s

    def _token_s(self, layout: Layout) -> float:
        replica_s = self._compute_s(layout) + self._transfer_s(layout) + self._launch_s(layout)
        waits = (layout.pp - 1) / layout.vpp + self.physics.straggler_micro_batches * (1 - 1 / layout.dp)
        return replica_s / layout.dp * (1 + waits / self._micro_batches(layout))

    def _compute_s(self, layout: Layout) -> float:
        """Of a token on a replica."""
        own = self.physics
        flops, experts = self.flops(self.work.context_tokens), 0.0
        if self.shape.num_experts:
            passes = _FORWARD + _BACKWARD + own.recompute * _FORWARD
            experts = 2.0 * passes * self.shape.active_expert_parameters
        even = (flops - experts) / own.kernel_efficiency + experts / own.expert_kernel_efficiency
        return even * layout.dp / self._peak(layout)

    def _transfer_s(self, layout: Layout) -> float:
        """Of a token on a replica: what its GPUs wait for each other's activations."""
        shape, own = self.shape, self.physics
        passes = _FORWARD + _BACKWARD / 2 + own.recompute * _FORWARD
        layers = shape.num_layers / layout.pp
        unit = layers * shape.hidden_size * WEIGHT_BYTES * passes / layout.cp
        reduced = 2 * 2 * (layout.tp - 1) / layout.tp * unit
        seconds = own.exposed_tp_share * reduced / self._link(layout.tp)
        if shape.num_experts:
            moved = 2 * shape.experts_per_token * (layout.ep - 1) / layout.ep * unit / layout.tp
            seconds += own.exposed_tp_share * moved / self._link(layout.tp * layout.ep)
        gathered = layers * 2 * shape.num_kv_heads * shape.head_dim * WEIGHT_BYTES * passes / layout.tp
        return seconds + (layout.cp - 1) / layout.cp * gathered / self._link(layout.tp * layout.cp)

    def _launch_s(self, layout: Layout) -> float:
        """Of a token on a replica."""
        return self.shape.num_layers / layout.pp * self.physics.layer_pass_s / self._micro_batch(layout)

    def _micro_batch(self, layout: Layout) -> float:
        """The tokens of a replica's micro-batch: as many as an update has for it, up to the cap of each cp rank."""
        return min(float(self.physics.micro_batch_tokens * layout.cp), self.work.update_tokens / layout.dp)

    def _micro_batches(self, layout: Layout) -> float:
        return self.work.update_tokens / layout.dp / self._micro_batch(layout)

    def _rank_parameters(self, layout: Layout) -> float:
        shape = self.shape
        experts = shape.expert_parameters / layout.ep
        return (shape.num_parameters - shape.expert_parameters + experts) / (layout.tp * layout.pp)

    def _link(self, num_gpus: int) -> float:
        """Bytes a second of one GPU in a group of so many: NVLink within a node. No group: nothing moves."""
        if num_gpus == 1:
            return inf
        within = num_gpus <= self.gpu.gpus_per_node
        rate = self.gpu.nvlink_bytes_per_s if within else self.gpu.network_bytes_per_s
        return rate * self.physics.link_efficiency
