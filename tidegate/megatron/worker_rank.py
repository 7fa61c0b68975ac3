"""Turns a worker process into a rank of its component's Megatron world.

The actor's workers use the slot's device too; their worlds belong to the elastic library.

Invariant: the store uses the socket that the instance bound, so nothing listens on another address.
"""

from __future__ import annotations

import torch

from tidegate.codec import decode_layout
from tidegate.job import Job
from tidegate.megatron import parallel
from tidegate.runtime.worker import WorkerChannel
from tidegate.types import gpu_index
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire


def slot_device(job: Job, channel: WorkerChannel) -> torch.device:
    """The device of the worker's slot."""
    if job.config.cluster.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", gpu_index(channel.grant.gpu))


def join_world(
    wired: wire.Rendezvous, layout: types_pb2.Layout, channel: WorkerChannel, *, device: torch.device, seed: int
) -> parallel.ParallelRanks:
    """Join the component's world. Raises ValueError where the layout and the number of ranks differ."""
    listener = channel.store_listener if wired.rank == 0 else None
    rendezvous = parallel.Rendezvous(
        rank=wired.rank,
        world_size=wired.world_size,
        port=wired.port,
        timeout_s=wired.timeout_s,
        host=wired.host,
        listen_fd=listener.detach() if listener is not None else None,
    )
    return parallel.start(rendezvous, decode_layout(layout), device=device, seed=seed)
