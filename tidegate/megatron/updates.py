"""One optimizer update over a rank's model chunks, on explicit process groups.

Order:
1. Gradients are zeroed.
2. The micro-batches run forward and backward, in one portion or in several.
3. Gradients are reduced, and the losses' sums added up.
4. What portions had reduced before is added, and the sum is scaled once.
5. The global gradient norm is computed.
6. Clipping, the learning rate and the step.

Invariants:
- Gradients are only ever added, over portions, micro-batches, and data- and context-parallel ranks. Denominators that
  are known only with the last portion are in the scale. [test_portions: come_close_to_a_whole_minibatch]
- A portion's gradients are reduced once, in the layout in which it ran.
  [test_carried_portions: is_that_of_an_undisturbed_trainer]
- Nothing is applied on any rank unless the loss and the norm are finite. All ranks see this alike, because both are
  sums over all ranks of the mesh.
- Standby ranks take no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.lr import assign_learning_rate
from tidegate.megatron.schedule import OnLogits, run_micro_batches


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an update, the same on every rank of the mesh."""

    sums: tuple[float, ...]
    """The sums of the values that `on_logits` kept, over all micro-batches and replicas. The loss is first."""
    grad_norm: float
    """The norm before clipping."""
    committed: bool
    """False: the loss or the gradient was not finite, and nothing was applied."""


@dataclass(frozen=True, slots=True)
class ReducedPortions:
    """What portions have added up to that are in no buffer any more, reduced over all ranks on which they ran."""

    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """(The gradient, the range of a buffer to which it belongs): the ranges that this rank's optimizer owns."""
    sums: Sequence[float]


class Updater:
    """Makes updates. Every rank of the mesh makes the same calls, with its own micro-batches.

    Gradients of portions wait in the chunks' buffers until `update`, `reduce` or `drop`.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: Any,
        groups: ProcessGroupCollection,
        *,
        num_sums: int,
    ) -> None:
        """`num_sums`: the length of the tensor that `on_logits` keeps of each micro-batch."""
        self._chunks = chunks
        self._optimizer = optimizer
        self._groups = groups
        self._num_sums = num_sums
        self._sums: torch.Tensor | None = None

    def accumulate(self, batches: Sequence[TokenBatch], on_logits: OnLogits) -> None:
        """Add the gradients of a portion's micro-batches, which may be none on this rank. `on_logits`: see `update`."""
        self._run(batches, on_logits, is_last=False)

    def reduce(self) -> tuple[float, ...]:
        """Reduce the portions' gradients: the owned ranges of the buffers have them until the next portion, which
        begins anew. Returns the sums over all ranks.
        """
        finalize_model_grads(list(self._chunks), None, pg_collection=self._groups)
        return self._add_up()

    def drop(self) -> None:
        """Drop the portions. The next one is the first of its update."""
        self._sums = None

    def update(
        self,
        batches: Sequence[TokenBatch],
        on_logits: OnLogits,
        learning_rate: float,
        *,
        scale: float = 1.0,
        reduced: ReducedPortions | None = None,
        applying: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Update:
        """Run the last portion and apply the update. `scale` is the factor on the sum of all portions' gradients.

        `reduced` are the portions that were reduced before, in this layout or another one.

        `on_logits` keeps sums over a micro-batch, the loss first. All cp and tp ranks of the last stage keep the same.
        Weights and optimizer state change within `applying()`.
        """
        self._run(batches, on_logits, is_last=True)
        sums = self.reduce()
        if reduced is not None:
            for gradient, place in reduced.gradients:
                place.add_(gradient)
            sums = tuple(map(sum, zip(sums, reduced.sums, strict=True)))
        if scale != 1.0:
            for chunk in self._chunks:
                chunk.scale_gradients(scale)
        self._optimizer.prepare_grads()
        norm = self._gradient_norm()
        if not (math.isfinite(norm) and math.isfinite(sums[0])):
            return Update(sums, norm, committed=False)
        clip_grad_by_total_norm_fp32(self._optimizer.get_parameters(), self._optimizer.config.clip_grad, norm)
        assign_learning_rate(self._optimizer.param_groups, learning_rate)
        with applying():
            self._optimizer.step_with_ready_grads()
        return Update(sums, norm, committed=True)

    def _run(self, batches: Sequence[TokenBatch], on_logits: OnLogits, *, is_last: bool) -> None:
        if self._sums is None:
            self._begin()
            self._sums = torch.zeros(self._shape_of_sums, dtype=torch.float64, device=self._device)
        self._expect(batches, is_last=is_last)
        kept = run_micro_batches(
            self._chunks, batches, on_logits, groups=self._groups, device=self._device, forward_only=False
        )
        if self._is_reporter:
            for number, part in enumerate(kept):
                self._row(self._sums, batches[number]).add_(part)

    def _begin(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _expect(self, batches: Sequence[TokenBatch], *, is_last: bool) -> None:
        """Prepare for these micro-batches, which come next."""

    @property
    def _shape_of_sums(self) -> tuple[int, ...]:
        return (self._num_sums,)

    def _row(self, sums: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """The row to which the micro-batch's sums are added."""
        return sums

    def _add_up(self) -> tuple[float, ...]:
        assert self._sums is not None, "the last portion has run"
        sums, self._sums = self._sums, None
        dist.all_reduce(sums, group=self._groups.intra_dist_opt)
        return tuple(self._total(sums).tolist())

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def _gradient_norm(self) -> float:
        return float(self._optimizer.get_grad_norm())

    @property
    def _is_reporter(self) -> bool:
        """Whether this rank adds its sums: one rank of the last stage does so for each replica."""
        last_stage: bool = self._groups.pp.rank() == self._groups.pp.size() - 1
        first: bool = self._groups.tp.rank() == 0 and self._groups.cp.rank() == 0
        return last_stage and first

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._chunks[0].parameters()).device
        return device


def data_parallel(
    chunk: torch.nn.Module,
    groups: ProcessGroupCollection,
    *,
    wrapper: type[DistributedDataParallel] = DistributedDataParallel,
) -> DistributedDataParallel:
    """The chunk with fp32 gradient buffers, reduced over the groups' data- and context-parallel ranks."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    # Megatron's config has no `finalize_model_grads_func`: the schedule would reduce gradients after each portion.
    return wrapper(config=get_model_config(chunk), ddp_config=config, module=chunk, pg_collection=groups)


def distributed_optimizer(
    chunks: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    groups: ProcessGroupCollection,
    *,
    config_overrides: Mapping[Any, Any] | None = None,
) -> Any:
    """Megatron's chain of DistributedOptimizers: one for dense parameters, and one for experts' where there are any.

    `config_overrides`: parameter groups as `get_megatron_optimizer` takes them. None: Megatron's usual groups.
    """
    overrides = None if config_overrides is None else dict(config_overrides)
    return get_megatron_optimizer(
        config, list(chunks), config_overrides=overrides, use_gloo_process_groups=False, pg_collection=groups
    )
