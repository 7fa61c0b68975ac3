"""The transport over torch.distributed: gloo between the memories of processes, NCCL between GPUs.

Order:
1. Local copies.
2. The batches of `buckets`, each finished before the next one starts, so that no order of the ranks can deadlock.

Messages: a bucket sends its small copies packed as one message, and each large copy as a message of its own. Both ends
derive this from the copies alone. A large copy is sent and received in place where it is contiguous.

A dead rank keeps its sends: the member that stands in for it sends the same messages in the same order.

Invariant: staging takes at most `memory_bytes`, plus one alignment per message, and is freed at the end of a run.
[test_peer_to_peer: staging_stays_within_its_bound]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tidegate.elastic.carry.transport import (
    NO_STAND_INS,
    StandIns,
    TransferFailed,
    copy_regions,
    source_region,
    target_region,
)
from tidegate.elastic.epoch.world import peers_needed
from tidegate.elastic.model.tensors import Tensors
from tidegate.elastic.plan.buckets import Bucket, batches
from tidegate.elastic.plan.plan import Part, RegionCopy

MEMORY_BYTES = 64 << 20
"""The staging memory of a rank. With four times as much, a transfer between four ranks was slower by a fifth.

Larger staging leaves the cache before it is sent, and its pages cost more to take.
"""
DIRECT_BYTES = 256 << 10
"""Copies of at least this size are messages of their own: packing one would take longer than a message costs."""
_ALIGNMENT_BYTES = 16


class PeerToPeer:
    """The transport over `group`, whose i-th rank is `members[i]`.

    `served_by` names the member that stands in for each dead rank. It is the same at all members.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int],
        *,
        served_by: Mapping[int, int] | None = None,
        hosts: Mapping[int, str] | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._group = group
        self._peers = {member: index for index, member in enumerate(members)}
        self._peers |= {rank: self._peers[member] for rank, member in (served_by or {}).items()}
        self._hosts = hosts
        self._memory_bytes = memory_bytes

    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        copy_regions(part.local, sources, targets)
        self.exchange(part, sources, targets, stand_ins=stand_ins)

    def exchange(
        self,
        part: Part,
        sources: Tensors,
        targets: Tensors,
        *,
        stand_ins: StandIns = NO_STAND_INS,
        carries: Callable[[RegionCopy], bool] = lambda copy: True,
    ) -> None:
        """Do those sends and receives of the part that `carries` selects. It selects the same copies at all members."""
        readable = {part.rank: sources} | {rank: tensors for rank, (_, tensors) in stand_ins.items()}
        outward = [copy for copy in part.sends if carries(copy)]
        for other, _ in stand_ins.values():
            outward += [copy for copy in other.sends if carries(copy) and copy.target_rank != part.rank]
        inward = []
        for copy in filter(carries, part.receives):
            if copy.source_rank in readable:
                copy_regions((copy,), readable[copy.source_rank], targets)
            else:
                inward.append(copy)
        self._check_peers((*outward, *inward))
        order = batches((*outward, *inward), ranks=self._peers, memory_bytes=self._memory_bytes, hosts=self._hosts)
        messages = [
            [self._message(copies, part.rank, readable, targets) for bucket in batch for copies in _messages_of(bucket)]
            for batch in order
        ]
        self._carry(messages)

    def _message(
        self, copies: tuple[RegionCopy, ...], me: int, readable: Mapping[int, Tensors], targets: Tensors
    ) -> _Message:
        source, target = copies[0].source_rank, copies[0].target_rank
        if source in readable:
            return _Message(self._peers[target], True, [source_region(readable[source], copy) for copy in copies])
        assert target == me
        return _Message(self._peers[source], False, [target_region(targets, copy) for copy in copies])

    def _carry(self, batches: list[list[_Message]]) -> None:
        staging_bytes = max((sum(message.staged_bytes for message in batch) for batch in batches), default=0)
        if not batches:
            return
        staging = torch.empty(staging_bytes, dtype=torch.uint8, device=batches[0][0].regions[0].device)
        for batch in batches:
            used_bytes = 0
            buffers = []
            for message in batch:
                buffers.append(message.buffer(staging[used_bytes:]))
                used_bytes += message.staged_bytes
            self._exchange_batch(batch, buffers)

    def _exchange_batch(self, batch: list[_Message], buffers: list[torch.Tensor]) -> None:
        operations = []
        for message, buffer in zip(batch, buffers, strict=True):
            if message.is_sent:
                message.pack(buffer)
            way = dist.isend if message.is_sent else dist.irecv
            operations.append(dist.P2POp(way, buffer, group=self._group, group_peer=message.peer))
        with peers_needed(f"exchanging {sum(map(torch.Tensor.numel, buffers))} bytes"):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for message, buffer in zip(batch, buffers, strict=True):
            if not message.is_sent:
                message.unpack(buffer)

    def _check_peers(self, copies: Iterable[RegionCopy]) -> None:
        ends = {rank for copy in copies for rank in (copy.source_rank, copy.target_rank)}
        if unknown := ends - self._peers.keys():
            raise TransferFailed(
                f"ranks {sorted(unknown)} of the plan are not members, and no member stands in for them; known ranks: "
                f"{sorted(self._peers)}"
            )


@dataclass(frozen=True, slots=True)
class _Message:
    """Regions that travel together, one after another without gaps."""

    peer: int
    is_sent: bool
    regions: list[torch.Tensor]

    @property
    def is_in_place(self) -> bool:
        return len(self.regions) == 1 and self.regions[0].is_contiguous()

    @property
    def staged_bytes(self) -> int:
        return 0 if self.is_in_place else -(-self._size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def _size_bytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    def buffer(self, staging: torch.Tensor) -> torch.Tensor:
        """The buffer for torch.distributed: the region itself, or the beginning of `staging`."""
        if self.is_in_place:
            return self.regions[0].reshape(-1).view(torch.uint8)
        return staging[: self._size_bytes]

    def pack(self, buffer: torch.Tensor) -> None:
        for region, packed in self._staged(buffer):
            packed.copy_(region)

    def unpack(self, buffer: torch.Tensor) -> None:
        for region, packed in self._staged(buffer):
            region.copy_(packed)

    def _staged(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each region with its place in the staging. A message in place has no staging."""
        start = 0
        for region in () if self.is_in_place else self.regions:
            yield region, buffer[start : start + region.nbytes].view(region.dtype).view(region.shape)
            start += region.nbytes


def _messages_of(bucket: Bucket) -> Iterator[tuple[RegionCopy, ...]]:
    small = tuple(copy for copy in bucket.copies if copy.size_bytes < DIRECT_BYTES)
    if small:
        yield small
    yield from ((copy,) for copy in bucket.copies if copy.size_bytes >= DIRECT_BYTES)
