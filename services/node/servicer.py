"""The agent's API for the cluster's scheduler: what the machine has, and its jobs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.node.far_machines import FarMachines
from services.node.jobs import NodeJobs
from tidegate.cluster.slots import Slots
from tidegate.cluster.submissions import Treatment
from tidegate.codec import encode_gate_state
from tidegate.config.job_config import JobConfig
from tidegate.gate import Gate
from tidegate.runtime.cuda import CudaDevice
from tidegate.runtime.inventory import this_machine
from tidegate.types import NodeId, job_id
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc

MOST_WAIT_S = 60.0


class Version:
    """Counts changes. It begins at a number of its own, so that another start of the agent has other versions."""

    def __init__(self, first: int) -> None:
        self.number = first
        self._other = asyncio.Event()

    def changed(self) -> None:
        self.number += 1
        self._other.set()
        self._other = asyncio.Event()

    async def other_than(self, known: int, *, wait_s: float) -> int:
        """The version, once it is another than `known`, and at the latest after `wait_s`."""
        if self.number == known:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._other.wait(), min(wait_s, MOST_WAIT_S))
        return self.number


class NodeServicer(cluster_pb2_grpc.NodeServicer):
    def __init__(
        self,
        slots: Slots,
        gates: Mapping[NodeId, Gate],
        machines: FarMachines,
        version: Version,
        *,
        host_memory_root: Path,
        name: str = "",
    ) -> None:
        """`gates`: of the nodes on this machine. `name`: of this machine, where several may keep the cluster."""
        self._name = name
        self._slots = slots
        self._gates = gates
        self._machines = machines
        self._version = version
        self._host_memory_root = host_memory_root
        self.devices: Sequence[CudaDevice] = ()
        """Set once they are found, which takes seconds."""
        self.jobs: NodeJobs | None = None
        """Set before the first call."""
        self.decided = asyncio.Event()
        """Set where the scheduler tells that it has carried out another round."""
        self._num_rounds = 0

    async def GetNode(self, request: cluster_pb2.GetNodeRequest, context: Any) -> cluster_pb2.GetNodeResponse:
        if request.num_rounds != self._num_rounds:
            self._num_rounds = request.num_rounds
            self.decided.set()
        version = await self._version.other_than(request.known_version, wait_s=request.wait_s)
        starts, (far, away) = self._jobs().starts, await self._machines.gates()
        total = shutil.disk_usage(self._host_memory_root).total
        own_memory = [cluster_pb2.HostMemory(nodes=sorted(self._gates), total_bytes=total)] if self._gates else []
        own_places = dict.fromkeys(map(str, self._gates), self._name) if self._name else {}
        own = [state for gate in self._gates.values() for state in gate.report()]
        return cluster_pb2.GetNodeResponse(
            version=version,
            num_slots={str(node): count for node, count in self._slots.nodes.items()},
            device=self._slots.device,
            slots_per_gpu=self._slots.per_gpu,
            jobs=[
                cluster_pb2.JobStart(
                    job=job,
                    start=each.number,
                    end=each.end or "",
                    message=each.message,
                    has_not_begun=not each.has_begun,
                    iteration=each.iteration,
                )
                for job, each in starts.items()
            ],
            gates=map(encode_gate_state, (*own, *far)),
            away=away,
            host_memory=(*own_memory, *self._machines.memory()),
            places=cluster_pb2.Places(machines=self._machines.names() | own_places, keeper=self._name),
        )

    async def GetMachineOfNode(
        self, request: cluster_pb2.GetNodeMachineRequest, context: Any
    ) -> cluster_pb2.GetNodeMachineResponse:
        far = await self._machines.machine_of(NodeId(request.node))
        return far or cluster_pb2.GetNodeMachineResponse(machine=this_machine(self._host_memory_root, self.devices))

    async def StartJob(self, request: cluster_pb2.StartJobRequest, context: Any) -> cluster_pb2.StartJobResponse:
        config = JobConfig.from_json(request.config)
        await self._jobs().start(
            job_id(request.job),
            request.start,
            config,
            Treatment(request.treatment),
            request.command,
            submitted_unix_ms=request.submitted_unix_ms,
        )
        return cluster_pb2.StartJobResponse()

    async def StopJob(self, request: cluster_pb2.StopJobRequest, context: Any) -> cluster_pb2.StopJobResponse:
        self._jobs().stop(job_id(request.job), cancels=request.cancels, reason=request.reason)
        return cluster_pb2.StopJobResponse()

    def _jobs(self) -> NodeJobs:
        assert self.jobs is not None, "a call came before the agent was made"
        return self.jobs
