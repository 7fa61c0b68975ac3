"""The shortest time in which a transport could move the traffic of a reshard, measured on the ranks of that reshard.

Every rank moves as many bytes as its part has, all ranks at once, into new memory. Nothing is planned, packed or
scheduled. By gloo each peer's bytes are one contiguous stretch. In shared memory each region of the plan is one, since
a processor's rate depends on the size of a copy: glibc writes past the caches only for copies larger than most of the
last cache. The rate of one single stretch is measured too.

    floor = seconds of the slowest rank
    rate  = bytes of the busiest rank / floor

The arenas are of the kind that the reshard itself uses.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

from tidegate.elastic.model.memory import Arena, ArenaReader, SharedArena
from tidegate.elastic.plan.plan import Part

_MESSAGE_BYTES = 64 << 20
"""The largest message. gloo sends larger messages no faster, and holds their pages meanwhile."""
Barrier = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that one rank moves."""

    local_bytes: int
    region_sizes: tuple[int, ...]
    """The bytes of each region that arrives from any rank."""
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]

    @classmethod
    def of(cls, part: Part) -> Traffic:
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for copy in part.sends:
            sent[copy.target_rank] += copy.size_bytes
        for copy in part.receives:
            received[copy.source_rank] += copy.size_bytes
        sizes = tuple(copy.size_bytes for copy in (*part.local, *part.receives))
        return cls(sum(copy.size_bytes for copy in part.local), sizes, sent, received)

    @property
    def arriving_bytes(self) -> int:
        return self.local_bytes + sum(self.received_bytes.values())


def shared_memory_seconds(sizes: Sequence[int], *, source: SharedArena, target: Arena, barrier: Barrier) -> float:
    """This rank's seconds for stretches of `sizes` bytes. Both arenas are new. The source is filled here and read in
    the same way as that of another rank."""
    size_bytes = max(sum(sizes), 1)
    filled = source.empty(size_bytes, torch.uint8).fill_(1)
    read = ArenaReader().tensor_at(source.place(filled))
    into = _fresh(target, size_bytes)
    ends = list(accumulate(sizes))
    stretches = [
        (into.numpy()[end - size : end], read.numpy()[end - size : end]) for size, end in zip(sizes, ends, strict=True)
    ]
    barrier()
    begin = time.perf_counter()
    for target_bytes, source_bytes in stretches:
        np.copyto(target_bytes, source_bytes)
    return time.perf_counter() - begin


def peer_to_peer_seconds(
    traffic: Traffic,
    *,
    group: dist.ProcessGroup,
    members: Sequence[int],
    source: Arena,
    target: Arena,
    barrier: Barrier,
) -> float:
    """This rank's seconds with two new arenas. Every member calls it with its own traffic."""
    sent_bytes = sum(traffic.sent_bytes.values())
    filled = source.empty(max(traffic.local_bytes, sent_bytes, 1), torch.uint8).fill_(1)
    into = _fresh(target, max(traffic.arriving_bytes, 1))
    peers = {member: index for index, member in enumerate(members)}
    operations = [
        dist.P2POp(dist.irecv, piece, group=group, group_peer=peers[rank])
        for rank, piece in _pieces(into[traffic.local_bytes :], traffic.received_bytes)
    ] + [
        dist.P2POp(dist.isend, piece, group=group, group_peer=peers[rank])
        for rank, piece in _pieces(filled, traffic.sent_bytes)
    ]
    barrier()
    begin = time.perf_counter()
    into[: traffic.local_bytes].copy_(filled[: traffic.local_bytes])
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    if into.is_cuda:
        torch.cuda.synchronize(into.device)
    return time.perf_counter() - begin


def _fresh(arena: Arena, size_bytes: int) -> torch.Tensor:
    """New memory, as that of a skeleton at the beginning of a transfer."""
    tensor = arena.empty(size_bytes, torch.uint8)
    arena.release()
    arena.materialise()
    return tensor


def _pieces(memory: torch.Tensor, sizes: Mapping[int, int]) -> list[tuple[int, torch.Tensor]]:
    start, pieces = 0, []
    for rank in sorted(sizes):
        region = memory[start : start + sizes[rank]]
        pieces += [(rank, piece) for piece in torch.split(region, _MESSAGE_BYTES)]
        start += sizes[rank]
    return pieces
