"""Turns a worker process into a rank of its component's Megatron world, on the device of its slot.

The actor's workers use the slot's device too; their worlds belong to the elastic library.

Invariant: the store uses the socket that the instance bound, so nothing listens on another address.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.codec import decode_layout
from tidegate.config.sections.job import ClusterSection
from tidegate.device_slots import memory_fraction, slot_device
from tidegate.megatron import parallel
from tidegate.runtime.worker import CallRefused, WorkerChannel
from tidegate.types import GpuId
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a worker computes.

    - slot_device: the name of the slot's device in the config's terms; slots that share it have the same.
    - memory_bytes: the memory of the device that torch may allocate in this process. None on a CPU.
    """

    device: torch.device
    slot_device: str
    memory_bytes: int | None


def take_slot(cluster: ClusterSection, gpu: GpuId) -> SlotPlace:
    """Bind this process to the slot's device, and its allocations to the slot's share.

    Raises CallRefused where the share is too small. A further call changes nothing.
    """
    slot = slot_device(gpu, kind=cluster.device, slots_per_gpu=cluster.slots_per_gpu)
    if slot.kind == "cpu":
        return SlotPlace(torch.device("cpu"), slot.name, None)
    device = torch.device("cuda", slot.index)
    torch.cuda.set_device(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    try:
        fraction = memory_fraction(total_bytes, num_sharing=slot.num_sharing)
    except ValueError as error:
        raise CallRefused(str(error)) from error
    if slot.num_sharing > 1:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    return SlotPlace(device, slot.name, int(total_bytes * fraction))


def join_world(
    wired: wire.Rendezvous, layout: types_pb2.Layout, channel: WorkerChannel, *, place: SlotPlace, seed: int
) -> parallel.ParallelRanks:
    """Join the component's world. Raises ValueError where the layout and the number of ranks differ."""
    listener = channel.store_listener if wired.rank == 0 else None
    rendezvous = parallel.Rendezvous(
        rank=wired.rank,
        world_size=wired.world_size,
        port=wired.port,
        timeout_s=wired.timeout_s,
        host=wired.host,
        slot_device=place.slot_device,
        listen_fd=listener.detach() if listener is not None else None,
    )
    return parallel.start(rendezvous, decode_layout(layout), device=place.device, seed=seed)
