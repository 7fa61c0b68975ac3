"""A rank's model, DDP and optimizer in one layout, built once. Its memory is freed and taken again; its objects stay.

Order of the making:
1. Refusals.
2. The provider's chunks, and DDP around each.
3. The chunks' parameters move into the arena.
4. `complete`: the optimizer, and its state moves into the arena.

Steps 1 to 3 need no other rank, so a rank that fails in them keeps none waiting.

Then any number of times: weights and state are filled (copied, or the provider's first weights and `start_anew`),
`materialise_gradients`, training, `release`, `materialise`.

Invariants:
- `tensors()` are exactly the tensors that the planner expects on this rank, and they are complete: once they are
  filled, training continues. [test_skeleton: holds_exactly_what_the_planner_says]
- The tensors and all views of them that Megatron keeps stay the same objects over a release.
  [test_skeleton: training_on_released_and_refilled_memory]

Contents are undefined after the making and after `materialise`. Gradients stay undefined until an update zeroes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from tidegate.elastic.epoch.world import peers_needed
from tidegate.elastic.model import compat, param_groups
from tidegate.elastic.model.adam import check_config
from tidegate.elastic.model.arena_placement import packed, place_buffers, place_frozen, place_optimizer_state
from tidegate.elastic.model.memory import Arena, ArenaFull
from tidegate.elastic.model.provider import ModelProvider
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import FlatRange, StateKind, require_supported
from tidegate.megatron.updates import data_parallel, distributed_optimizer


@dataclass(frozen=True, slots=True)
class NumBytes:
    """The bytes that a skeleton takes while it is materialised."""

    parameters: int
    optimizer: int
    gradients: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients


class Skeleton:
    """All ranks of the mesh make and use it alike. An arena belongs to one skeleton."""

    def __init__(
        self,
        provider: ModelProvider,
        mesh: Mesh,
        me: int,
        groups: ProcessGroupCollection,
        optimizer_config: OptimizerConfig,
        *,
        device: torch.device,
        arena: Arena,
        config_overrides: Mapping[Any, Any] | None = None,
        wrapper: type[DistributedDataParallel] = DistributedDataParallel,
    ) -> None:
        """`config_overrides`: parameter groups as `get_megatron_optimizer` takes them. None: Megatron's usual groups.

        Raises OptimizerRefused before anything is built, ArenaFull, and PeerLost when a rank does not take part.
        """
        check_config(optimizer_config, provider.parameters())
        self.mesh = mesh
        self.groups = groups
        self._arena = arena
        with peers_needed("building the model"):
            modules = provider.build(mesh, me, groups, device=device)
        self._parameters = dict(provider.local_parameters(modules, mesh, me))
        self.chunks = [data_parallel(module, groups, wrapper=wrapper) for module in modules]
        for chunk in self.chunks:
            place_buffers(chunk, arena)
        place_frozen(self._parameters.values(), arena)
        self._parameter_bytes = arena.num_bytes
        self._optimizer_config = optimizer_config
        self._config_overrides = config_overrides
        self._device = device

    def complete(self) -> Skeleton:
        """Build the optimizer and return itself. All ranks of the mesh call this once all have made theirs.

        Raises the same errors as the making.
        """
        with compat.gathering_within(self.groups.intra_dist_opt, device=self._device):
            self.optimizer: Any = distributed_optimizer(
                self.chunks, self._optimizer_config, self.groups, config_overrides=self._config_overrides
            )
        require_supported(compat.class_names(self.optimizer))
        param_groups.mark(self.optimizer)
        self._shares = place_optimizer_state(self.optimizer, self._parameters, self._arena)
        self._gradient_buffers = [
            buffer.grad_data for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        self.num_bytes = NumBytes(
            parameters=self._parameter_bytes,
            optimizer=self._arena.num_bytes - self._parameter_bytes,
            gradients=sum(buffer.nbytes for buffer in self._gradient_buffers),
        )
        return self

    def tensors(self) -> dict[TensorKey, torch.Tensor]:
        """All of this rank's state as flat tensors: of a parameter the whole local weights, of its optimizer state the
        owned range.
        """
        found: dict[TensorKey, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            found[name, StateKind.WEIGHT] = parameter.detach().view(-1)
            if name in self._shares:
                found |= {(name, kind): tensor for kind, tensor in self._shares[name].tensors.items()}
        return found

    def ranges(self) -> dict[str, FlatRange]:
        """By parameter: the elements of which this rank keeps optimizer state."""
        return {name: share.range for name, share in self._shares.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Once gradients are reduced: those of each of the `ranges`, not a copy. After an update they are clipped."""
        found: dict[str, torch.Tensor] = {}
        for name, share in self._shares.items():
            gradient: torch.Tensor = getattr(self._parameters[name], "main_grad")  # noqa: B009 - Megatron sets it
            found[name] = gradient.view(-1)[slice(*share.range)]
        return found

    def empty_gradients(self, arena: Arena) -> dict[str, torch.Tensor]:
        """Tensors as those of `gradients`, in another arena and filled with 0. Raises ArenaFull."""
        sizes = [end - start for start, end in self.ranges().values()]
        return {name: tensor.zero_() for name, tensor in zip(self._shares, packed(arena, sizes), strict=True)}

    def start_anew(self) -> None:
        """Set the optimizer's state to that before the first update, from the present weights."""
        self.reset_moments()
        with torch.no_grad():
            for name, share in self._shares.items():
                if StateKind.MAIN_PARAM in share.tensors:
                    weights = self._parameters[name].view(-1)[slice(*share.range)]
                    share.tensors[StateKind.MAIN_PARAM].copy_(weights)

    def reset_moments(self) -> None:
        """Set the moments and step counts to 0. Weights and main parameters stay."""
        for share in self._shares.values():
            for kind, tensor in share.tensors.items():
                if kind is not StateKind.MAIN_PARAM:
                    tensor.zero_()
        compat.set_group_steps(self.optimizer, 0)

    def release(self) -> None:
        """Give all memory back. A second call does nothing."""
        self.release_gradients()
        self._arena.release()

    def materialise(self) -> None:
        """Take the memory of weights and state again. Raises ArenaFull; the skeleton then stays released."""
        self._arena.materialise()

    def release_gradients(self) -> None:
        """Give back the memory of gradients, which has no use between two updates."""
        # Adam's own gradients are views of the buffers in fp32; otherwise they are copies, which would keep memory.
        self.optimizer.zero_grad()
        for buffer in self._gradient_buffers:
            buffer.untyped_storage().resize_(0)

    def materialise_gradients(self) -> None:
        """Take the memory of gradients, which an update needs. Does nothing where it is there. Raises ArenaFull."""
        try:
            for buffer in self._gradient_buffers:
                if buffer.untyped_storage().nbytes() != buffer.nbytes:
                    buffer.untyped_storage().resize_(buffer.nbytes)
        except RuntimeError as error:  # torch's allocators raise nothing more exact on every device
            self.release_gradients()
            raise ArenaFull(f"no memory for {self.num_bytes.gradients} bytes of gradients: {error}") from error
