"""What the ranks of the tests of worlds run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.ranks import RankContext, Results
from tidegate.elastic.layout import Mesh, even_chunks
from tidegate.elastic.rendezvous import connect_store, serve_store
from tidegate.elastic.world import Membership, PeerLost, World, peers_needed
from tidegate.megatron.groups import megatron_groups
from tidegate.types import Layout

CPU = torch.device("cpu")


def open_store(context: RankContext) -> TCPStore:
    """Rank 0 serves it."""
    if context.listen_fd is not None:
        return serve_store(context.listen_fd, timeout_s=context.timeout_s)
    return connect_store(context.port, timeout_s=context.timeout_s)


def join(context: RankContext, store: TCPStore, *, epoch: int, members: tuple[int, ...], **options: Any) -> World:
    membership = Membership(epoch=epoch, members=members)
    return World.join(membership, me=context.rank, store=store, device=CPU, timeout_s=20.0, **options)


def summed(world: World, members: tuple[int, ...]) -> int:
    """The sum of the members' ids, over their group."""
    total = torch.tensor([world.me])
    dist.all_reduce(total, group=world.group(members))
    return int(total.item())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def mesh_of(layout: dict[str, int], ranks: tuple[int, ...]) -> Mesh:
    asked = Layout(**layout)
    return Mesh(layout=asked, ranks=ranks, chunks=even_chunks(8, pp=asked.pp))


def a_member_dies(context: RankContext, *, victim: int, num_elements: int) -> Results:
    store = open_store(context)
    everyone = tuple(range(context.world_size))
    world = join(context, store, epoch=1, members=everyone)
    summed(world, everyone)
    tensor = torch.ones(num_elements)
    world.barrier(everyone)
    began = time.monotonic()
    try:
        if context.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with peers_needed("all_reduce"):
            dist.all_reduce(tensor, group=world.group(everyone))
    except PeerLost:
        lost_after_s = time.monotonic() - began
    world.leave(abort=True)
    left_after_s = time.monotonic() - began
    survivors = tuple(rank for rank in everyone if rank != victim)
    world = join(context, store, epoch=2, members=survivors)
    total = summed(world, survivors)
    world.leave()
    return {"seconds": np.array([lost_after_s, left_after_s]), "total": np.array(total)}


def groups_of_layouts(context: RankContext, *, layouts: list[dict[str, int]], ranks: list[int]) -> Results:
    """The seconds that the collections of each layout took, first and again."""
    store = open_store(context)
    everyone = tuple(range(context.world_size))
    world = join(context, store, epoch=1, members=everyone)
    seconds = []
    for _ in range(2):
        for layout in layouts:
            world.barrier(everyone)
            began = time.perf_counter()
            megatron_groups(world, mesh_of(layout, tuple(ranks)))
            seconds.append(time.perf_counter() - began)
    counts = [open_descriptors(), threads()]
    world.leave()
    return {
        "seconds": np.array(seconds),
        "counts": np.array(counts),
        "after": np.array([open_descriptors(), threads()]),
    }
