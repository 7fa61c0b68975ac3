"""The memory of a transfer by messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tidegate.elastic.carry.peer_to_peer import DIRECT_BYTES, PeerToPeer
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Holding, Part, RegionCopy
from tidegate.elastic.plan.regions import Block

MEMORY_BYTES = 4096
ALIGNMENT_BYTES = 16


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """The sizes of all byte tensors that are allocated in this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class is untyped
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and made.dtype is torch.uint8:
            self.bytes.append(made.nbytes)
        return made


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Two ranks of torch's fake backend, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_staging_stays_within_its_bound(group: dist.ProcessGroup) -> None:
    sizes = [100, 3, 2000, 7, 1500, DIRECT_BYTES // 4]
    names = [f"p{index}" for index in range(len(sizes))]
    holdings = tuple(
        Holding(name, StateKind.WEIGHT, 4, size, (Block(0, 0, 1, size, 0, size),))
        for name, size in zip(names, sizes, strict=True)
    )
    sends = tuple(
        RegionCopy(name, StateKind.WEIGHT, 4, 0, 1, 0, 0, 1, size, 0, size, 0, size)
        for name, size in zip(names, sizes, strict=True)
    )
    sources = {(name, StateKind.WEIGHT): torch.ones(size) for name, size in zip(names, sizes, strict=True)}
    transport = PeerToPeer(group, (0, 1), memory_bytes=MEMORY_BYTES)

    with Allocations() as allocations:
        transport.run(Part(0, holdings, (), (), sends, ()), sources, {})

    (staging_bytes,) = allocations.bytes
    assert 0 < staging_bytes <= MEMORY_BYTES + ALIGNMENT_BYTES * len(sizes)
