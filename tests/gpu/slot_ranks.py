"""The rank processes of the tests of slots on CUDA devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.integration.elastic.transport_ranks import Model, assert_bits, switch_of, tensors_of
from tests.integration.elastic.world_ranks import join, open_store
from tests.ranks import RankContext, Results
from tidegate.config.sections.job import ClusterSection
from tidegate.elastic.carry.device_memory import DeviceMemory
from tidegate.elastic.carry.peer_to_peer import PeerToPeer
from tidegate.elastic.plan.plan import Part
from tidegate.runtime.slot_place import take_slot
from tidegate.types import GpuId


def cluster(slots_per_gpu: int) -> ClusterSection:
    placement = {"actor": "0", "rollout": "1", "inference": "2"}
    raw = {"nodes": {"n0": 3}, "device": "cuda", "slots_per_gpu": slots_per_gpu, "component_placement": placement}
    return ClusterSection.model_validate(raw)


def alone(context: RankContext) -> Results:
    """The backend of a world of one rank on slot 2 of a shared device, and a sum on that device."""
    place = take_slot(cluster(4), GpuId("n0/2"))
    world = join(
        context, open_store(context), epoch=1, members=(0,), device=place.device, slot_device=place.slot_device
    )
    summed = torch.full((2,), 3.0, device=place.device)
    dist.all_reduce(summed, group=world.group((0,)))
    backend = str(world.backend)
    found = summed.cpu().numpy()
    world.leave()
    return {"backend": np.array(backend), "summed": found}


def switches_over_device_memory(context: RankContext, *, switches: list[Any], maps: bool) -> Results:
    """Each switch on tensors of one device. Returns what the ranks answered to `open`.

    `maps`: whether rank 1 says that it can map the others' memory.
    """
    device = torch.device("cuda:0")
    members = tuple(range(context.world_size))
    world = join(context, open_store(context), epoch=1, members=members, device=device)
    model, answers = Model(), []
    for ends in switches:
        switch = switch_of(ends, dict.fromkeys(members, "n0"))
        held, want = model.of(switch.source, world.me), model.of(switch.target, world.me)
        sources = {key: tensor.to(device) for key, tensor in tensors_of(held, is_filled=True).items()}
        targets = {key: tensor.to(device) for key, tensor in tensors_of(want, is_filled=False).items()}
        part = switch.part(world.me) if world.me in switch.ranks else Part(world.me, (), (), (), (), ())
        carrier = DeviceMemory(PeerToPeer(world.group(members), members, hosts=switch.hosts))
        announced = world.gather(members, carrier.announce(part, sources))
        answer = carrier.open(part, announced)
        found = world.gather(members, answer if maps or world.me != 1 else b"it cannot")
        carrier.settle(found)
        carrier.run(part, sources, targets)
        world.barrier(members)
        for tensors, bits in ((targets, want), (sources, held)):
            assert_bits({key: tensor.cpu() for key, tensor in tensors.items()}, bits)
        for tensor in sources.values():
            tensor.untyped_storage().resize_(0)
        answers += [found[rank].decode() for rank in members]
    world.leave()
    torch.cuda.empty_cache()
    return {"answers": np.array(answers), "kept_bytes": np.array(torch.cuda.memory_allocated())}


def fills_its_slot(context: RankContext, *, slots_per_gpu: int) -> Results:
    """Whether 0.8 and 1.2 times the slot's memory can be allocated."""
    place = take_slot(cluster(slots_per_gpu), GpuId("n0/1"))
    assert place.memory_bytes is not None
    fits = []
    for part in (0.8, 1.2):
        try:
            torch.empty(int(place.memory_bytes * part), dtype=torch.uint8, device=place.device)
            fits.append(True)
        except torch.cuda.OutOfMemoryError:
            fits.append(False)
        torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(place.device).total_memory
    return {"memory_bytes": np.array(place.memory_bytes), "total_bytes": np.array(total_bytes), "fits": np.array(fits)}
