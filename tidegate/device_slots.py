"""Which part of which device a slot has. Pure.

Slots are numbered on their node. The first `slots_per_gpu` of them share the node's device 0, the next ones device 1,
and so on. Every worker takes its device from `slot_device`, on CPUs too.

Invariants:
- A device has at most `slots_per_gpu` slots, and they are neighbours. [test_device_slots: neighbours_share_a_device]
- The slots that share a device fit into its memory, with the CUDA contexts of their processes.
  [test_device_slots: contexts_and_shares_fit]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate.types import GpuId, NodeId, gpu_index, node_of

DeviceKind: TypeAlias = Literal["cpu", "cuda"]

CONTEXT_BYTES = 2 << 30
"""What the processes of a slot take of a GPU beside torch's allocator: CUDA contexts, kernels, workspaces of libraries.

A slot has a worker of each component, of which one works. On an H200 a process that waits took 0.51 GiB, and one that
had worked 0.72 GiB. With too little, a slot that fills its share makes another one run out of memory. With too much,
shares are smaller than they could be.
"""


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """The device of a slot.

    - index: its number on the node, as the node's CUDA counts.
    - num_sharing: the most slots that share it.
    """

    node: NodeId
    kind: DeviceKind
    index: int
    num_sharing: int

    @property
    def name(self) -> str:
        """Slots of one name share a device."""
        return f"{self.node}/{self.kind}:{self.index}"


def slot_device(gpu: GpuId, *, kind: DeviceKind, slots_per_gpu: int) -> SlotDevice:
    return SlotDevice(node_of(gpu), kind, gpu_index(gpu) // slots_per_gpu, slots_per_gpu)


def num_devices(num_slots: int, *, slots_per_gpu: int) -> int:
    """The devices that a node with this number of slots needs."""
    return -(-num_slots // slots_per_gpu)


def memory_fraction(total_bytes: int, *, num_sharing: int) -> float:
    """The part of a device's memory that torch may allocate in each process of `num_sharing` slots. 1 for one slot.

    Raises ValueError where the contexts leave none.
    """
    if num_sharing == 1:
        return 1.0
    fraction = 1 / num_sharing - CONTEXT_BYTES / total_bytes
    if fraction <= 0:
        raise ValueError(
            f"cluster.slots_per_gpu={num_sharing} gives each slot {total_bytes / num_sharing / 2**30:.1f} GiB of a GPU "
            f"of {total_bytes / 2**30:.1f} GiB, and its CUDA contexts need {CONTEXT_BYTES / 2**30:.1f} GiB: lower it "
            f"to {max(1, -(-total_bytes // CONTEXT_BYTES) - 1)} or less"
        )
    return fraction
