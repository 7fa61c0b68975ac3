"""What stands in an elastic optimizer's way in megatron-core 0.19.2 and torch, on any device, and the way round it.

- Megatron makes optimizers with a gather of pickled objects over WORLD, in which standby members would have to take
  part: `gathering_within` gives it the ranks that it is for, and sends JSON.
- Where Adam's step count lives depends on whose Adam Megatron found: a tensor a parameter in torch's, made at the first
  step only, a number a parameter group in FusedAdam of Transformer Engine and Apex: `keeps_step_tensors`,
  `group_steps`, `set_group_steps`.
- An optimizer may be a chain, and one of its links a stub that has nothing to train: `links`.
Invariants: nothing is patched but inside `gathering_within`, and there only one module's own name `torch`, not torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer

from tidegate.elastic.epoch.world import gather_bytes, peers_needed


@contextmanager
def gathering_within(group: dist.ProcessGroup, *, device: torch.device) -> Iterator[None]:
    """Megatron optimizers made in this context gather over `group` alone; all of its ranks make theirs together.

    Raises PeerLost when one does not. Not for several threads.
    """
    megatron_optimizer.torch = _Torch(group, device)
    try:
        with peers_needed("gathering the parameter groups"):
            yield
    finally:
        megatron_optimizer.torch = torch


def links(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain that have something to train, an optimizer that is no chain being one of one link."""
    for link in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not link.is_stub_optimizer:
            yield link


def class_names(optimizer: Any) -> Iterator[str]:
    """As `require_supported` takes them: the links' classes, and what they wrap where that is Megatron's own."""
    for link in links(optimizer):
        yield type(link).__name__
        if type(link.optimizer).__module__.startswith("megatron."):
            yield type(link.optimizer).__name__


def keeps_step_tensors(adam: torch.optim.Optimizer) -> bool:
    """Whether each parameter has a step count of its own among its state."""
    return isinstance(adam, torch.optim.Adam)


def group_steps(optimizer: Any) -> int | None:
    """What the groups have counted, of which those that are empty on this rank count nothing; None: they do not."""
    return max((group["step"] for group in optimizer.param_groups if "step" in group), default=None)


def set_group_steps(optimizer: Any, steps: int) -> None:
    """Where the groups count the steps, let them go on from these."""
    for link in links(optimizer):
        if not keeps_step_tensors(link.optimizer):
            for group in link.optimizer.param_groups:
                group["step"] = steps


class _Distributed:
    """torch.distributed, with a group in WORLD's place for what Megatron's making of an optimizer asks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_world_size(self) -> int:
        """optimizer/__init__.py:363."""
        return self._group.size()

    def all_gather_object(self, gathered: list[Any], own: Any) -> None:
        """optimizer/__init__.py:364: keys of parameter groups, tuples of pairs of names and numbers."""
        payloads = gather_bytes(self._group, json.dumps(own).encode(), device=self._device)
        gathered[:] = [_as_keys(json.loads(payload)) for payload in payloads]


class _Torch:
    """torch, with that `distributed`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.distributed = _Distributed(group, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _as_keys(decoded: list[Any]) -> list[tuple[tuple[tuple[str, Any], ...] | None, bool]]:
    """Lists as the tuples that they were before they were JSON."""
    return [(override and tuple((name, value) for name, value in override), expert) for override, expert in decoded]
