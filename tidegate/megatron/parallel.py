"""Starts and ends torch.distributed and Megatron's parallel state in a rank process.

Order:
1. Rendezvous: a TCP store, which rank 0 serves on a socket that it gets or binds itself.
2. The process group, on the backend that the ranks' devices decide.
3. Megatron's groups of the layout.

Invariants:
- No socket listens on another interface than the configured one, torch's store and gloo included. The default is
  loopback.
- Every wait has the caller's timeout.
- After `stop` a process may start again with another layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import Store, TCPStore

from tidegate.elastic.epoch.backends import agreed_backend
from tidegate.elastic.epoch.rendezvous import connect_store, listening_socket, serve_store, use_interface
from tidegate.types import LOOPBACK, Layout


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one world meet, and this rank's socket and interface."""

    rank: int
    world_size: int
    port: int
    timeout_s: float
    host: str = LOOPBACK
    interface: str = "lo"
    slot_device: str | None = None
    """The device that this rank's slot stands for on a CPU; ranks of one name share it. None: it shares none."""
    listen_fd: int | None = None
    """Rank 0's listening socket on (host, port), which the store takes over. None: rank 0 binds its own."""
    store: Store | None = None
    """The world's own keys in a store that this rank serves or has reached already. None: `start` makes one."""


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """This rank's place on each axis of its layout, and its groups."""

    groups: ProcessGroupCollection
    layout: Layout
    tp: int
    pp: int
    dp: int


def start(rendezvous: Rendezvous, layout: Layout, *, device: torch.device, seed: int) -> ParallelRanks:
    """Join the world and build the layout's groups. Raises ValueError unless the world has the layout's number
    of ranks.
    """
    if rendezvous.world_size != layout.num_ranks:
        raise ValueError(
            f"layout {layout} needs tp * pp * dp * cp = {layout.num_ranks} ranks, the world has "
            f"{rendezvous.world_size}: give the component {layout.num_ranks} GPUs or change its layout"
        )
    timeout = timedelta(seconds=rendezvous.timeout_s)
    use_interface(rendezvous.interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = rendezvous.store or _store(rendezvous)
    backend = agreed_backend(
        store,
        device,
        me=rendezvous.rank,
        members=range(rendezvous.world_size),
        slot_device=rendezvous.slot_device,
    )
    # torch wraps the hook at every start and never unwraps it.
    hook = sys.excepthook
    dist.init_process_group(
        backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )
    sys.excepthook = hook
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        distributed_timeout_minutes=rendezvous.timeout_s / 60,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelRanks(
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        layout=layout,
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
    )


def stop() -> None:
    """Drop Megatron's groups and leave the world. Safe where nothing was started."""
    parallel_state.destroy_model_parallel()
    # parallel_state.py:2506 drops all groups but this one, whose sockets would stay open.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def parallel(rendezvous: Rendezvous, layout: Layout, *, device: torch.device, seed: int) -> Iterator[ParallelRanks]:
    """`start`, and `stop` in every case."""
    try:
        yield start(rendezvous, layout, device=device, seed=seed)
    finally:
        stop()


def _store(rendezvous: Rendezvous) -> TCPStore:
    if rendezvous.rank != 0:
        return connect_store(rendezvous.port, timeout_s=rendezvous.timeout_s, host=rendezvous.host)
    listen_fd = rendezvous.listen_fd
    if listen_fd is None:
        listen_fd = listening_socket(rendezvous.host, rendezvous.port).detach()
    return serve_store(listen_fd, timeout_s=rendezvous.timeout_s, host=rendezvous.host)
