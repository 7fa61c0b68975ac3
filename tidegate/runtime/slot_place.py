"""Where a worker computes: the device of its slot, and the slot's share of the device's memory.

It imports nothing of Megatron: generation workers use it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.config.sections.job import ClusterSection
from tidegate.device_slots import memory_fraction, slot_device
from tidegate.runtime.interfaces import NotThisMachine, interface_of
from tidegate.runtime.worker import CallRefused
from tidegate.types import GpuId, node_of


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a worker computes.

    - slot_device: the name of the slot's device in the config's terms; slots that share it have the same.
    - interface: the network interface on which others reach the worker.
    - memory_bytes: the memory of the device that torch may allocate in this process. None on a CPU.
    """

    device: torch.device
    slot_device: str
    interface: str
    memory_bytes: int | None


def take_slot(cluster: ClusterSection, gpu: GpuId) -> SlotPlace:
    """Bind this process to the slot's device, and its allocations to the slot's share.

    Raises CallRefused where the share is too small, or the node's address another machine's. A further call changes
    nothing.
    """
    try:
        interface = interface_of(cluster.address_of(node_of(gpu)))
    except NotThisMachine as error:
        raise CallRefused(f"cluster.addresses: {error}") from error
    slot = slot_device(gpu, kind=cluster.device, slots_per_gpu=cluster.slots_per_gpu)
    if slot.kind == "cpu":
        return SlotPlace(torch.device("cpu"), slot.name, interface, None)
    device = torch.device("cuda", slot.index)
    torch.cuda.set_device(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    try:
        fraction = memory_fraction(total_bytes, num_sharing=slot.num_sharing)
    except ValueError as error:
        raise CallRefused(str(error)) from error
    if slot.num_sharing > 1:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    return SlotPlace(device, slot.name, interface, int(total_bytes * fraction))
