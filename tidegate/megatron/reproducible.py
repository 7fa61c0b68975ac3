"""Updates whose bits are the same for every number of replicas and pipeline stages, and for every cut into portions.

A minibatch is cut into micro-batches without regard to the layout. They are assigned to logical shards, whose number is
a power of two that the number of replicas divides. In each portion a replica runs its shards one after another.

Order of the sums:
1. Each shard's gradients, in micro-batch order. Between two portions each has a buffer of its own.
2. The shards, by a fixed binary tree: first a replica's own shards, then over replicas.
3. The two gradients of tied embeddings, last, because with several stages two ranks have them.

The losses' sums go through the same tree. The norm's squares are added up as integers.

Invariants:
- Parameters, moments, loss and norm are bitwise functions of the start and the samples, for any dp, pp and vpp at one
  tp and cp.
- They do not depend on the portions, if no portion cuts a bundle (`tidegate.megatron.bundles`).
  [test_portions: has_the_bits_of_a_whole_minibatch]
- A model or setting that would break this is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.reduction import RunningTree, own_sum, sum_of_squares, tree_sum
from tidegate.megatron.updates import Updater


def check_data_parallel(dp: int, num_logical_shards: int) -> None:
    """Raises ValueError where the replicas cannot run equally many of the logical shards."""
    if num_logical_shards < 1 or num_logical_shards & (num_logical_shards - 1):
        raise ValueError(
            f"num_logical_shards={num_logical_shards} is not a power of two, so the tree that adds them up has no "
            "fixed shape: set it to one that every dp of the job divides, such as 8"
        )
    if num_logical_shards % dp:
        legal = ", ".join(str(1 << power) for power in range(num_logical_shards.bit_length()))
        raise ValueError(
            f"dp={dp} cannot be reproducible: it does not divide num_logical_shards={num_logical_shards}; legal dp: "
            f"{legal}"
        )


def check_model(config: TransformerConfig) -> None:
    """Raises ValueError where the bits of a micro-batch's gradients depend on more than the micro-batch and
    the weights.
    """
    for name, value, want, reason in (
        ("num_moe_experts", config.num_moe_experts, None, "which tokens meet in an expert's product depends on ep"),
        ("hidden_dropout", config.hidden_dropout, 0.0, "each layout draws other masks"),
        ("attention_dropout", config.attention_dropout, 0.0, "each layout draws other masks"),
        ("gradient_accumulation_fusion", config.gradient_accumulation_fusion, False, "it adds up outside the tree"),
        ("torch's threads", torch.get_num_threads(), 1, "the order within a product depends on them"),
    ):
        if value != want:
            raise ValueError(
                f"{name}={value} cannot be reproducible, because {reason}: set it to {want}, or leave reproducible mode"
            )


class _ShardedGradient:
    """A gradient to which others add micro-batch after micro-batch. It holds one shard's sum at a time.

    The sums of other shards are moved aside: into the tree once they are complete, which the last portion shows.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._at = 0
        """The shard whose sum the gradient holds."""
        self._aside: dict[int, torch.Tensor] = {}
        self._tree = RunningTree()
        self._coming: Sequence[int] = ()
        self._num_added = 0
        self._is_last = False

    def expect(self, shards: Sequence[int], gradient: torch.Tensor, *, is_last: bool) -> None:
        """The next micro-batches are of these shards, in rising order where it is the last portion."""
        self._check_all_added()
        self._coming, self._num_added, self._is_last = shards, 0, is_last
        if is_last:
            self._swap(gradient, 0)

    def before_added(self, gradient: torch.Tensor) -> None:
        # Fillers that a schedule runs after the last micro-batch add nothing: leave the gradient as it is.
        if self._num_added < len(self._coming):
            self._go_to(gradient, self._coming[self._num_added])
        self._num_added += 1

    def finish(self, gradient: torch.Tensor) -> None:
        """Turn the gradient into the sum of all shards."""
        self._check_all_added()
        self._go_to(gradient, self._num_shards - 1)
        self._tree.finish(gradient)

    def _go_to(self, gradient: torch.Tensor, shard: int) -> None:
        if not self._is_last:
            self._swap(gradient, shard)
        while self._at < shard:
            self._tree.add(gradient.clone())
            self._at += 1
            self._load(gradient)

    def _swap(self, gradient: torch.Tensor, shard: int) -> None:
        if shard != self._at:
            self._aside[self._at] = gradient.clone()
            self._at = shard
            self._load(gradient)

    def _load(self, gradient: torch.Tensor) -> None:
        found = self._aside.pop(self._at, None)
        if found is None:
            gradient.zero_()
        else:
            gradient.copy_(found)

    def _check_all_added(self) -> None:
        if self._num_added < len(self._coming):
            raise AssertionError(f"got {self._num_added} gradients of {len(self._coming)}")


class OrderedDataParallel(DistributedDataParallel):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's DDP, with gradients that are added up by the tree over logical shards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gradients: dict[torch.nn.Parameter, _ShardedGradient] = {}
        for parameter in self.params_with_grad:
            # This hook runs before DDP's hook, which adds the micro-batch's gradient to main_grad.
            parameter.register_post_accumulate_grad_hook(self._before_added)
        self._output_use = _OutputUse.of(self.module)

    def start(self, *, num_shards: int) -> None:
        """Begin an update over this many shards of this replica. The gradients must be zero."""
        for parameter in self.params_with_grad:
            self._gradients[parameter] = _ShardedGradient(num_shards)
        if self._output_use:
            self._output_use.start(_ShardedGradient(num_shards))

    def expect(self, shards: Sequence[int], *, is_last: bool) -> None:
        """The next micro-batches are of these shards of this replica."""
        for parameter, gradient in self._gradients.items():
            gradient.expect(shards, _main_grad(parameter), is_last=is_last)
        if self._output_use:
            self._output_use.expect(shards, is_last=is_last)

    def drop(self) -> None:
        """Give back what an update holds that will not be finished."""
        self._gradients.clear()
        if self._output_use:
            self._output_use.drop()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """This rank's range of each bucket becomes the sum over replicas. Elements outside of it become meaningless."""
        for parameter, gradient in self._gradients.items():
            gradient.finish(_main_grad(parameter))
        self._gradients.clear()
        for bucket in (bucket for buffer in self.buffers for bucket in buffer.buckets):
            sizes = [bucket.grad_data.numel() // self.dp_cp_group.size()] * self.dp_cp_group.size()
            own = torch.split(bucket.grad_data, sizes)[self.dp_cp_group.rank()]
            own.copy_(self._own_sum(bucket.grad_data, sizes))
            if self._output_use and self._output_use.weight in bucket.params:
                self._add_output_gradient(bucket, sizes)

    def _add_output_gradient(self, bucket: Any, sizes: Sequence[int]) -> None:
        """Add the output's gradient of a tied weight to the embedding's, after both have been added up."""
        assert self._output_use is not None
        weight = self._output_use.weight
        first, end = bucket.param_to_index[weight]
        ranges = [
            (max(first, stop - size), min(end, stop)) for size, stop in zip(sizes, accumulate(sizes), strict=True)
        ]
        own_sizes = [max(stop - start, 0) for start, stop in ranges]
        rank = self.dp_cp_group.rank()
        own = torch.split(_main_grad(weight).view(-1), own_sizes)[rank]
        own.add_(self._own_sum(self._output_use.finish().view(-1), own_sizes))

    def _own_sum(self, flat: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        num_context_ranks = self.dp_cp_group.size() // self.dp_group.size()
        return own_sum(flat, sizes, self.dp_cp_group, num_context_ranks=num_context_ranks)

    def _before_added(self, parameter: torch.nn.Parameter) -> None:
        self._gradients[parameter].before_added(_main_grad(parameter))


class _OutputUse:
    """The output layer's use of a tied weight, with its own gradient, on a rank that has the embedding too.

    During an update the output layer gets an alias of the weight in the same memory, which neither DDP nor the
    optimizer knows. The alias lives only that long, because the weight's memory may be replaced between updates.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.weight = weight
        self._alias: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._gradient: _ShardedGradient | None = None

    @classmethod
    def of(cls, chunk: torch.nn.Module) -> _OutputUse | None:
        """None where the weight is not tied, or where the two uses are already two parameters of two ranks."""
        model = get_attr_wrapped_model(chunk, "share_embeddings_and_output_weights", return_model_obj=True)
        if not (model.share_embeddings_and_output_weights and model.pre_process and model.post_process):
            return None
        use = cls(model.shared_embedding_or_output_weight())
        model.output_layer.register_forward_pre_hook(use._hand_over, with_kwargs=True)
        return use

    def start(self, gradient: _ShardedGradient) -> None:
        total = torch.zeros_like(self.weight, dtype=torch.float32, requires_grad=False)
        alias = self.weight.detach().requires_grad_()

        def add(alias: torch.Tensor) -> None:
            assert alias.grad is not None
            gradient.before_added(total)
            total.add_(alias.grad)
            alias.grad = None

        alias.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]  # torch's is untyped
        self._gradient, self._total, self._alias = gradient, total, alias

    def expect(self, shards: Sequence[int], *, is_last: bool) -> None:
        assert self._gradient is not None
        assert self._total is not None
        self._gradient.expect(shards, self._total, is_last=is_last)

    def finish(self) -> torch.Tensor:
        """The gradient. The alias is dropped."""
        assert self._gradient is not None
        assert self._total is not None
        total = self._total
        self._gradient.finish(total)
        self.drop()
        return total

    def drop(self) -> None:
        self._gradient = self._total = self._alias = None

    def _hand_over(self, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs if self._alias is None else kwargs | {"weight": self._alias}


class ReproducibleUpdater(Updater):
    """Makes updates of chunks that are wrapped in OrderedDataParallel.

    Each micro-batch names its logical shard, as `replica_batches(..., num_shards=num_logical_shards)` makes them.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: Any,
        groups: ProcessGroupCollection,
        *,
        num_sums: int,
        num_logical_shards: int,
    ) -> None:
        check_data_parallel(groups.dp.size(), num_logical_shards)
        check_model(get_model_config(chunks[0]))
        super().__init__(chunks, optimizer, groups, num_sums=num_sums)
        self._ordered: list[OrderedDataParallel] = [chunk for chunk in chunks if isinstance(chunk, OrderedDataParallel)]
        if len(self._ordered) != len(chunks):
            raise ValueError("chunks of plain DDP have no logical shards: wrap them in OrderedDataParallel")
        self._num_logical_shards = num_logical_shards
        self._num_own_shards = num_logical_shards // groups.dp.size()

    def _begin(self) -> None:
        super()._begin()
        for chunk in self._ordered:
            chunk.start(num_shards=self._num_own_shards)

    def _expect(self, batches: Sequence[TokenBatch], *, is_last: bool) -> None:
        first = self._groups.dp.rank() * self._num_own_shards
        shards = [-1 if batch.shard is None else batch.shard - first for batch in batches]
        if shards != sorted(shards) or any(shard not in range(self._num_own_shards) for shard in shards):
            raise ValueError(
                f"micro-batches of the logical shards {[batch.shard for batch in batches]} are not those of this "
                f"replica's {self._num_own_shards} from {first} on, in order: deal them with num_shards"
            )
        for chunk in self._ordered:
            chunk.expect(shards, is_last=is_last)

    @property
    def _shape_of_sums(self) -> tuple[int, ...]:
        """Each shard's sums have their own row. All ranks but one add zeros to it."""
        return self._num_logical_shards, self._num_sums

    def _row(self, sums: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        assert batch.shard is not None, "checked before the micro-batches ran"
        return sums[batch.shard]

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        return tree_sum(list(sums))

    def drop(self) -> None:
        super().drop()
        for chunk in self._ordered:
            chunk.drop()

    def _gradient_norm(self) -> float:
        chained = self._optimizer.chained_optimizers
        gradients = (gradient for part in chained for gradient in part.get_grads_for_grad_norm())
        return math.sqrt(sum_of_squares(gradients, self._groups.intra_dist_opt, device=self._device))


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient: torch.Tensor = getattr(parameter, "main_grad")  # noqa: B009 - DDP sets it on parameters
    return gradient


def updater(
    chunks: Sequence[DistributedDataParallel],
    optimizer: Any,
    groups: ProcessGroupCollection,
    *,
    num_sums: int,
    num_logical_shards: int | None,
) -> Updater:
    """The reproducible updater where there are logical shards. Wrap the chunks in `wrapper(num_logical_shards)`."""
    if num_logical_shards is None:
        return Updater(chunks, optimizer, groups, num_sums=num_sums)
    return ReproducibleUpdater(chunks, optimizer, groups, num_sums=num_sums, num_logical_shards=num_logical_shards)


def wrapper(num_logical_shards: int | None) -> type[DistributedDataParallel]:
    """The DDP for `data_parallel`."""
    return DistributedDataParallel if num_logical_shards is None else OrderedDataParallel
