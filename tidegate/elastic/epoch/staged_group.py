"""A process group for ranks that share a device: gloo, with a copy in host memory of every tensor.

gloo takes CUDA tensors in some collectives. It sends and receives through the CPU's own addresses, where a CUDA tensor
fails, and pipelines and reshards need that. So this group copies in every operation, in one way:

1. The call copies all its tensors to host memory. The copy is ordered after the work of the current CUDA stream.
2. gloo works on the copies.
3. `wait` copies what was received back, on the current CUDA stream. Nothing has arrived before `wait`.

Tensors on a CPU are copied too, so a CPU runs every line that a GPU does.

Invariant: results are those of gloo on the tensors themselves. [test_staged_group: results_are_those_of_gloo]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

STAGED_BACKEND = "staged"
"""The name under which torch knows the group's backend."""
_NO_TIMEOUT = timedelta(0)
"""torch's sign for the group's own timeout."""


class _StagedWork(Work):
    """An operation on copies. `arrivals` are pairs of a tensor and its copy, for what the operation writes."""

    def __init__(self, work: Work, arrivals: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._arrivals = arrivals

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        done = self._work.wait(timeout)
        for tensor, copy in self._arrivals:
            # A collective hides its writes from autograd; `data` does the same.
            tensor.data.copy_(copy)
        self._arrivals = []
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _staged(name: str, *, reads_first: bool = False, writes_first: bool = True) -> Callable[..., Work]:
    """gloo's operation `name` on copies. Its first argument is what it writes, and in some operations reads."""

    def operation(group: StagedGroup, first: Any, *others: Any) -> Work:
        originals = list(_tensors(first))
        copied = _in_host_memory(first, filled=reads_first)
        work = getattr(group.gloo, name)(copied, *(_in_host_memory(other, filled=True) for other in others))
        arrivals = list(zip(originals, _tensors(copied), strict=True)) if writes_first else []
        return _StagedWork(work, arrivals)

    return operation


class StagedGroup(dist.ProcessGroup):
    """The group. torch 2.13 renamed some operations; the older names are here for older versions."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # With a store, torch would make a plain group that calls none of the methods below.
        super().__init__(rank, size)  # type: ignore[call-arg] # torch's stub lacks this constructor
        self.gloo = dist.ProcessGroup(store, rank, size)
        backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
        # torch asks the group itself for its name and devices, and for barriers, which carry no tensor of the caller.
        for group in (self, self.gloo):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)

    allreduce = _staged("allreduce", reads_first=True)
    allreduce_coalesced = _staged("allreduce_coalesced", reads_first=True)
    broadcast = _staged("broadcast", reads_first=True)
    reduce = _staged("reduce", reads_first=True)
    allgather = _staged("allgather")
    all_gather_single = _staged("all_gather_single")
    all_gather_single_coalesced = _staged("all_gather_single_coalesced")
    gather = _staged("gather")
    scatter = _staged("scatter")
    reduce_scatter = _staged("reduce_scatter")
    reduce_scatter_single = _staged("reduce_scatter_single")
    reduce_scatter_single_coalesced = _staged("reduce_scatter_single_coalesced")
    alltoall = _staged("alltoall")
    all_to_all_single = _staged("all_to_all_single")
    send = _staged("send", reads_first=True, writes_first=False)
    recv = _staged("recv")
    recv_anysource = _staged("recv_anysource")

    _allgather_base = _staged("_allgather_base")
    allgather_into_tensor_coalesced = _staged("allgather_into_tensor_coalesced")
    _reduce_scatter_base = _staged("_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = _staged("reduce_scatter_tensor_coalesced")
    alltoall_base = _staged("alltoall_base")


def register_staged_backend() -> None:
    """Let torch make groups of the backend `STAGED_BACKEND`. Further calls change nothing."""
    if STAGED_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED_BACKEND, StagedGroup, devices=["cpu", "cuda"])


def _in_host_memory(argument: Any, *, filled: bool) -> Any:
    """The argument with a copy of each tensor in it; an unfilled one where it is written only."""
    if isinstance(argument, torch.Tensor):
        own = argument.detach()
        return own.to("cpu", copy=True) if filled else torch.empty_like(own, device="cpu")
    if isinstance(argument, list):
        return [_in_host_memory(each, filled=filled) for each in argument]
    return argument


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list):
        for each in argument:
            yield from _tensors(each)
