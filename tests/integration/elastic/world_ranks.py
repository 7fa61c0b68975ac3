"""The rank processes of the tests of worlds."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import Store, TCPStore

from tests.ranks import RankContext, Results
from tidegate.elastic.epoch.rendezvous import connect_store, serve_store
from tidegate.elastic.epoch.world import Membership, PeerLost, World, peers_needed
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.megatron.groups import groups_of, megatron_groups
from tidegate.types import Layout

CPU = torch.device("cpu")
TIMEOUT_S = 20.0


def open_store(context: RankContext, *, timeout_s: float = TIMEOUT_S) -> TCPStore:
    """The world's store, which rank 0 serves."""
    if context.listen_fd is not None:
        return serve_store(context.listen_fd, timeout_s=timeout_s)
    return connect_store(context.port, timeout_s=timeout_s)


def join(context: RankContext, store: Store, *, epoch: int, members: tuple[int, ...], **options: Any) -> World:
    options = dict[str, Any](timeout_s=TIMEOUT_S, device=CPU) | options
    return World.join(Membership(epoch, members), me=context.rank, store=store, **options)


def summed(world: World, members: tuple[int, ...]) -> int:
    """The sum of the members' ids, over their group."""
    total = torch.tensor([world.me])
    dist.all_reduce(total, group=world.group(members))
    return int(total.item())


def mesh_of(layout: dict[str, int], ranks: list[int]) -> Mesh:
    sizes = Layout(**layout)
    return Mesh(layout=sizes, ranks=tuple(ranks), chunks=even_chunks(8, pp=sizes.pp))


def usage() -> list[int]:
    """This process's open descriptors and threads."""
    return [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]


def a_member_dies(context: RankContext, *, victim: int, num_elements: int, slot_device: str | None = None) -> Results:
    """The seconds until the others noticed and until they had left, and the survivors' sum in a new epoch."""
    store = open_store(context)
    everyone = tuple(range(context.world_size))
    world = join(context, store, epoch=1, members=everyone, slot_device=slot_device)
    held = world.group(everyone)
    tensor = torch.ones(num_elements)
    world.barrier(everyone)
    began = time.monotonic()
    seconds = []
    try:
        if context.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with peers_needed("adding up"):
            dist.all_reduce(tensor, group=held)
    except PeerLost:
        seconds.append(time.monotonic() - began)
    world.leave(abort=True)
    seconds.append(time.monotonic() - began)
    survivors = tuple(rank for rank in everyone if rank != victim)
    world = join(context, store, epoch=2, members=survivors, slot_device=slot_device)
    total = summed(world, survivors)
    world.leave()
    return {"seconds": np.array(seconds), "total": np.array(total)}


def one_aborts(context: RankContext) -> Results:
    """Rank 0 aborts while its own collective runs and the group is referenced. The others wait for it meanwhile."""
    store = open_store(context)
    everyone = tuple(range(context.world_size))
    world = join(context, store, epoch=1, members=everyone)
    held = world.group(everyone[::-1])
    own = world.group((0, 1)) if context.rank < 2 else held
    world.barrier(everyone)
    began = time.monotonic()
    if context.rank == 0:
        dist.all_reduce(torch.ones(2), group=own, async_op=True)
    else:
        try:
            with peers_needed("adding up"):
                dist.all_reduce(torch.ones(2), group=held)
        except PeerLost:
            pass
    world.leave(abort=True)
    seconds = time.monotonic() - began
    world = join(context, store, epoch=2, members=everyone[::-1])
    total = summed(world, everyone[::-1])
    world.leave()
    return {"seconds": np.array(seconds), "total": np.array(total)}


def one_is_late(context: RankContext) -> Results:
    """Rank 1 comes to no collective and then to no epoch. Returns rank 0's errors, and a sum of the epoch after."""
    store = open_store(context)
    world = join(context, store, epoch=1, members=(0, 1), timeout_s=5.0)
    messages = []
    if context.rank == 0:
        messages.append(_loss(lambda: world.gather((0, 1), b"here")))
    else:
        store.get("epoch 2 was given up")
    world.leave(abort=True)
    if context.rank == 0:
        messages.append(_loss(lambda: join(context, store, epoch=2, members=(0, 1), timeout_s=0.5)))
        store.set("epoch 2 was given up", "")
    world = join(context, store, epoch=3, members=(0, 1))
    total = summed(world, (0, 1))
    world.leave()
    return {"messages": np.array(messages), "total": np.array(total)}


def _loss(call: Any) -> str:
    try:
        call()
    except PeerLost as error:
        return str(error)
    return "nothing was lost"


def members_come_and_go(context: RankContext) -> Results:
    """The payloads that each epoch's members gathered, as texts. An epoch without this rank is omitted."""
    store = open_store(context)
    seen = []
    for epoch, members in enumerate([(0, 1), (2, 0, 1), (1, 2), (2, 1, 0, 3)]):
        if context.rank in members:
            world = join(context, store, epoch=epoch, members=members)
            gathered = world.gather(members, b"x" * context.rank)
            world.barrier(members)
            seen.append(" ".join(f"{member}:{payload.decode()}" for member, payload in gathered.items()))
            world.leave()
    return {"seen": np.array(seen)}


def megatron_ranks(context: RankContext, *, layout: dict[str, int], ranks: list[int], own: bool) -> Results:
    """By role, the ranks of this rank's group, made by us or by `parallel_state`; -1 for None."""
    store = open_store(context)
    world = join(context, store, epoch=1, members=tuple(range(context.world_size)))
    if own:
        collection = megatron_groups(world, mesh_of(layout, ranks))
        assert collection is not None
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout["tp"],
            pipeline_model_parallel_size=layout["pp"],
            context_parallel_size=layout["cp"],
            expert_model_parallel_size=layout["ep"],
            create_gloo_process_groups=False,
        )
        roles = {field.name for field in fields(ProcessGroupCollection)} - {"inter_dist_opt"}
        collection = ProcessGroupCollection.use_mpu_process_groups(sorted(roles))
    found: dict[str, npt.NDArray[Any]] = {}
    for field in fields(ProcessGroupCollection):
        group = getattr(collection, field.name)
        found[field.name] = np.array(-1 if group is None else dist.get_process_group_ranks(group))
    if own:
        assert set(vars(collection)) == set(found)
        assert collection.dp.rank() == dist.get_process_group_ranks(collection.dp).index(context.rank)
    world.barrier(world.membership.members)
    return found


def meshes_in_turns(
    context: RankContext, *, meshes: list[tuple[dict[str, int], list[int]]], num_turns: int, max_groups: int
) -> Results:
    """The seconds of each turn for its groups, and the descriptors and threads. Checks a sum over each group."""
    store = open_store(context)
    everyone = tuple(range(context.world_size))
    world = join(context, store, epoch=1, members=everyone, max_groups=max_groups)
    seconds, used = [], []
    for turn in range(num_turns):
        mesh = mesh_of(*meshes[turn % len(meshes)])
        roles = groups_of(mesh)
        world.barrier(everyone)
        began = time.perf_counter()
        world.prepare({group for of_rank in roles.values() for group in of_rank.values()})
        megatron_groups(world, mesh)
        seconds.append(time.perf_counter() - began)
        for role in ("tp", "pp", "dp_cp", "mp", "expt_dp") if context.rank in roles else ():
            members = roles[context.rank][role]
            assert summed(world, members) == sum(members), role
        used.append(usage())
    world.leave()
    return {"seconds": np.array(seconds), "used": np.array(used)}


def epochs(context: RankContext, *, num_epochs: int, slot_device: str | None = None) -> Results:
    """Descriptors and threads after each epoch. Every third epoch ends by an abort, with its groups referenced."""
    store = open_store(context)
    everyone = tuple(range(context.world_size))
    used = []
    for epoch in range(num_epochs):
        world = join(context, store, epoch=epoch, members=everyone, slot_device=slot_device)
        held = megatron_groups(world, mesh_of({"tp": 2, "pp": 1, "dp": 1, "cp": 1, "ep": 1}, [1, 0]))
        assert summed(world, everyone) == sum(everyone)
        world.leave(abort=epoch % 3 == 0)
        del held
        used.append(usage())
    return {"used": np.array(used)}
