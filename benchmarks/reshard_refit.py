"""Megatron's own resharding in memory, `megatron.core.resharding`: the parameters alone, both models allocated.

It uses Megatron's planner and executor over a copy service of two dozen lines. Megatron's own copy service for gloo
needs a CUDA stream and stages GPU data in pinned memory, which would double the copies here. The first run plans. Later
runs find the plan in Megatron's cache, whose key does not contain the order of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.resharding.copy_services.base import CopyService, RecvOp, SendOp, match_local_ops_by_task_id
from megatron.core.resharding.refit import clear_all_caches, swap_model_weights

from benchmarks.reshard_sides import Crew, Parts
from benchmarks.reshard_state import LogicalState
from tidegate.elastic.epoch.world import Membership, World
from tidegate.elastic.plan.layout import Mesh
from tidegate.megatron.groups import megatron_groups

CPU = torch.device("cpu")


class GlooWithoutStaging(CopyService):  # type: ignore[misc] # megatron-core has no types
    """Sends from the memory of the source and receives into that of the target."""

    def __init__(self) -> None:
        super().__init__()
        self._sends: list[SendOp] = []
        self._receives: list[RecvOp] = []

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        self._sends.append(SendOp(task_id, src_tensor.detach(), dest_rank))

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        self._receives.append(RecvOp(task_id, dest_tensor, src_rank))

    def run(self) -> None:
        sends = [op for op in self._sends if op.dest_rank == self.rank]
        receives = [op for op in self._receives if op.src_rank == self.rank]
        for send, receive in match_local_ops_by_task_id(sends, receives, type(self).__name__, self.rank):
            receive.tensor.copy_(send.tensor)
        far = [dist.P2POp(dist.isend, op.tensor, op.dest_rank) for op in self._sends if op.dest_rank != self.rank]
        far += [dist.P2POp(dist.irecv, op.tensor, op.src_rank) for op in self._receives if op.src_rank != self.rank]
        for work in dist.batch_isend_irecv(far) if far else []:
            work.wait()
        self._sends, self._receives = [], []


class Refit:
    def __init__(self, crew: Crew, state: LogicalState) -> None:
        self._crew = crew
        self._state = state
        self._world: World | None = None
        self._source: list[Any] = []
        self._target: list[Any] = []

    def prepare(self, source: Mesh, target: Mesh) -> None:
        if self._world is None:
            clear_all_caches()
            membership = Membership(1, tuple(range(self._crew.size)))
            self._world = World.join(
                membership,
                me=self._crew.rank,
                store=self._crew.new_world(),
                device=CPU,
                timeout_s=self._crew.timeout_s,
            )
            self._source, self._target = (self._build(self._world, mesh) for mesh in (source, target))
            self._mesh = target
            self._service = GlooWithoutStaging()
            if self._source:
                self._state.fill(self._source, None, source, self._crew.rank)
        for module in self._target:
            for parameter in module.parameters():
                parameter.data.zero_()

    def switch(self) -> dict[str, float]:
        watch = Parts()
        with watch.part("swap"):
            swap_model_weights(self._source or None, self._target or None, self._service)
        return watch.seconds

    def floor(self) -> dict[str, float]:
        return {}

    def check(self) -> None:
        if self._target:
            self._state.check(self._target, None, self._mesh, self._crew.rank)

    def close(self) -> None:
        clear_all_caches()
        self._source, self._target = [], []
        if self._world is not None:
            self._world.leave()

    def _build(self, world: World, mesh: Mesh) -> list[Any]:
        groups = megatron_groups(world, mesh)
        if groups is None:
            return []
        return self._state.provider.build(mesh, self._crew.rank, groups, device=CPU)
