"""The transport for several hosts: shared memory where both ends are on one host, torch.distributed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.elastic.carry.peer_to_peer import PeerToPeer
from tidegate.elastic.carry.shared_memory import SharedMemory
from tidegate.elastic.carry.transport import NO_STAND_INS, StandIns
from tidegate.elastic.model.tensors import Tensors
from tidegate.elastic.plan.plan import Part, RegionCopy


class HybridTransport:
    """`hosts` names the host of every rank of the plan. A dead rank is on the host that has its arena."""

    def __init__(self, shared_memory: SharedMemory, peer_to_peer: PeerToPeer, hosts: Mapping[int, str]) -> None:
        self._shared_memory = shared_memory
        self._peer_to_peer = peer_to_peer
        self._hosts = hosts

    def run(self, part: Part, sources: Tensors, targets: Tensors, *, stand_ins: StandIns = NO_STAND_INS) -> None:
        near = (copy for copy in part.receives if not self._is_far(copy))
        self._shared_memory.pull(part.local, near, sources, targets)
        self._peer_to_peer.exchange(part, sources, targets, stand_ins=stand_ins, carries=self._is_far)

    def _is_far(self, copy: RegionCopy) -> bool:
        return self._hosts[copy.source_rank] != self._hosts[copy.target_rank]
