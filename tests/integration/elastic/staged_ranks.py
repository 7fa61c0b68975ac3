"""The rank processes of the tests of staged groups."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.integration.elastic.world_ranks import join, open_store
from tests.ranks import RankContext, Results
from tidegate.elastic.epoch.staged_group import StagedGroup


def backend(context: RankContext, *, slot_devices: list[str | None]) -> Results:
    """The backend of the world and the types of its groups, and a sum over each."""
    everyone = tuple(range(context.world_size))
    world = join(context, open_store(context), epoch=1, members=everyone, slot_device=slot_devices[context.rank])
    kinds, sums = [], []
    for members in (everyone, everyone[::-1]):
        group = world.group(members)
        kinds.append(type(group).__name__)
        total = torch.tensor([context.rank])
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    name = dist.get_backend()
    world.leave()
    return {"backend": np.array([str(world.backend), name]), "kinds": np.array(kinds), "sums": np.array(sums)}


def every_operation(context: RankContext, *, slot_device: str | None, dtype: str, device: str = "cpu") -> Results:
    """What each operation that Megatron and the transports use leaves in its tensors."""
    everyone, place = tuple(range(context.world_size)), {"slot_device": slot_device, "device": torch.device(device)}
    world = join(context, open_store(context), epoch=1, members=everyone, **place)
    group, rank, size = world.group(everyone), context.rank, context.world_size
    generator = torch.Generator().manual_seed(rank)

    def drawn(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator).to(device, getattr(torch, dtype))

    found: dict[str, torch.Tensor] = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        found[f"all_reduce {name}"] = drawn(5)
        dist.all_reduce(found[f"all_reduce {name}"], op=op, group=group)
    found["broadcast"] = drawn(3)
    dist.broadcast(found["broadcast"], src=1, group=group)
    found["all_gather_into_tensor"] = drawn(2 * size)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], drawn(2), group=group)
    rows = [drawn(2) for _ in range(size)]
    dist.all_gather(rows, drawn(2), group=group)
    found["all_gather"] = torch.cat(rows)
    found["reduce_scatter_tensor"] = drawn(2)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], drawn(2 * size), group=group)
    shares = [rank + 1] * size
    found["all_to_all_single"] = drawn(sum(range(1, size + 1)))
    dist.all_to_all_single(
        found["all_to_all_single"], drawn(sum(shares)), list(range(1, size + 1)), shares, group=group
    )
    found["reduce"] = drawn(3)
    dist.reduce(found["reduce"], dst=0, group=group)
    if context.rank != 0:
        # What gloo leaves on the other ranks depends on when its messages came.
        del found["reduce"]
    found["received"] = drawn(4)
    ring = [
        dist.P2POp(dist.isend, drawn(4), group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, found["received"], group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    found["coalesced 0"], found["coalesced 1"] = drawn(3), drawn(4)
    with distributed_c10d._coalescing_manager(group=group, async_ops=True) as handle:
        dist.all_reduce(found["coalesced 0"], group=group)
        dist.all_reduce(found["coalesced 1"], group=group)
    handle.wait()
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": each} for each in everyone]
    dist.barrier(group=group)
    is_staged = isinstance(group, StagedGroup)
    world.leave()
    return {name: tensor.float().cpu().numpy() for name, tensor in found.items()} | {"is staged": np.array(is_staged)}


def asynchronous(context: RankContext) -> Results:
    """A tensor before and after `wait`, and what autograd and a later write of the sender make of it."""
    everyone = tuple(range(context.world_size))
    world = join(context, open_store(context), epoch=1, members=everyone, slot_device="n0/cpu:0")
    group = world.group(everyone)
    leaf = torch.full((2,), 1.0 + context.rank, requires_grad=True)
    summed = leaf * 2
    version = summed._version
    work = dist.all_reduce(summed, group=group, async_op=True)
    assert work is not None
    before = summed.detach().clone()
    work.wait()
    after = summed.detach().clone()
    assert summed._version == version
    (grad,) = torch.autograd.grad(summed.sum(), leaf)
    sent, received = torch.full((2,), float(context.rank)), torch.empty(2)
    other = 1 - context.rank
    sending = dist.isend(sent, group=group, group_dst=other)
    sent.fill_(-1.0)
    dist.recv(received, group=group, group_src=other)
    assert sending is not None
    sending.wait()
    world.leave()
    arrays = {"before": before, "after": after, "grad": grad, "received": received, "sent": sent}
    return {name: tensor.numpy() for name, tensor in arrays.items()}
