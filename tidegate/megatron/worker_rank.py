"""Turns a worker process into a rank of its component's Megatron world, on the device of its slot.

The worlds of the actor belong to the elastic library.

Invariant: the store uses the socket that the instance bound, so nothing listens on another address.
"""

from __future__ import annotations

from tidegate.codec import decode_layout
from tidegate.megatron import parallel
from tidegate.runtime.slot_place import SlotPlace
from tidegate.runtime.worker import WorkerChannel
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire


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
