"""Adapts megatron-core 0.19.2 and torch to elastic optimizers, on any device.

- Megatron gathers pickled objects over WORLD when it makes optimizers, and standby members would have to take part.
  `gathering_within` lets only the given ranks gather, and sends JSON.
- The place of Adam's step count depends on the Adam that Megatron found. torch's Adam keeps a tensor per parameter,
  made at the first step. FusedAdam of Transformer Engine and Apex keeps a number per parameter group. See
  `keeps_step_tensors`, `group_steps` and `set_group_steps`.
- An optimizer may be a chain, and a link of it may be a stub that has nothing to train. See `links`.

Invariant: only `gathering_within` patches anything, and only the name `torch` in one module, not torch itself.
[test_compat: only_one_name_of_one_module]
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
    """Megatron optimizers that are made in this context gather over `group` alone. All its ranks make theirs together.

    Raises PeerLost when a rank does not take part. Not safe for several threads.
    """
    megatron_optimizer.torch = _Torch(group, device)
    try:
        with peers_needed("gathering the parameter groups"):
            yield
    finally:
        megatron_optimizer.torch = torch


def links(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain that have something to train. An optimizer that is not a chain is one link."""
    for link in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not link.is_stub_optimizer:
            yield link


def class_names(optimizer: Any) -> Iterator[str]:
    """The names for `require_supported`: the links' classes, and the classes that they wrap where those are Megatron's
    own.
    """
    for link in links(optimizer):
        yield type(link).__name__
        if type(link.optimizer).__module__.startswith("megatron."):
            yield type(link.optimizer).__name__


def keeps_step_tensors(adam: torch.optim.Optimizer) -> bool:
    """Whether each parameter has its own step count in its state."""
    return isinstance(adam, torch.optim.Adam)


def group_steps(optimizer: Any) -> int | None:
    """The number of steps that the groups counted; None where they do not count.

    The maximum is taken, because groups that are empty on this rank count nothing.
    """
    return max((group["step"] for group in optimizer.param_groups if "step" in group), default=None)


def set_group_steps(optimizer: Any, steps: int) -> None:
    """Let groups that count their steps continue from this number."""
    for link in links(optimizer):
        if not keeps_step_tensors(link.optimizer):
            for group in link.optimizer.param_groups:
                group["step"] = steps


class _Distributed:
    """torch.distributed for Megatron's making of an optimizer, with a group in the place of WORLD."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_world_size(self) -> int:
        """Used in optimizer/__init__.py:363."""
        return self._group.size()

    def all_gather_object(self, gathered: list[Any], own: Any) -> None:
        """Used in optimizer/__init__.py:364, for keys of parameter groups: tuples of pairs of names and numbers."""
        payloads = gather_bytes(self._group, json.dumps(own).encode(), device=self._device)
        gathered[:] = [_as_keys(json.loads(payload)) for payload in payloads]


class _Torch:
    """torch with that `distributed`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.distributed = _Distributed(group, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _as_keys(decoded: list[Any]) -> list[tuple[tuple[tuple[str, Any], ...] | None, bool]]:
    """Turn JSON's lists back into the tuples that they were."""
    return [(override and tuple((name, value) for name, value in override), expert) for override, expert in decoded]
