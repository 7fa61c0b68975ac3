"""The other machines of the cluster, as its agent sees them: which of them answer, and what their gates say.

A machine is away until it has answered and is as this one. One that does not answer a question in time is away from
then on. Those that are away are asked again, `AGAIN_S` after the last answer or silence.

Invariants:
- A machine's gates are told, or its nodes are named as away. [test_far_machines: that_is_away_has_no_gates]
  [test_far_machines: comes_back_while_another]
- A machine tells of no other's gates. [test_far_machines: of_another_machine]
- A machine that is not as this one is away, with the reason. [test_far_machines: of_another_version]
- One of another release is away, and keeps the jobs that it has. [test_far_machines: of_another_release_keeps_its_jobs]
- Of two agents on one machine the later one is away, and so is one on this machine.
  [test_far_machines: two_agents_on_one_machine] [test_far_machines: on_the_keepers_own_machine]
- Who asks for gates waits for no machine that is away. [test_far_machines: waits_for_no_machine]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.cluster.machines import Machines
from tidegate.cluster.slots import Slots
from tidegate.codec import WireError, decode_gate_state
from tidegate.config.sections.job import ClusterSection, MachineSection
from tidegate.launcher.preflight import machine_fault, release_fault, same_machine_fault
from tidegate.ownership.records import GateState
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.hosted import stub_of
from tidegate.runtime.inventory import host_memory_id
from tidegate.types import NodeId, node_of
from tidegate.v1 import cluster_pb2, machine_pb2

ANSWER_S = 2.0
"""A gate reads files of its own machine."""
AGAIN_S = 1.0
_UNASKED = "it was not asked yet"
_SILENT = (PeerUnavailable, PeerRefused, WireError)


@dataclass(slots=True)
class _Far:
    """`away_s`: since when it is away. `reason`: why; empty: it is there. `memory_bytes`: its host memory, as it told
    last; 0: it has told nothing yet. `memory_id`: the name of that memory. `keeps_jobs`: its agent is of another
    release, which counts for jobs that start."""

    section: MachineSection
    away_s: float
    reason: str = _UNASKED
    memory_bytes: int = 0
    memory_id: str = ""
    keeps_jobs: bool = False
    channels: Channels | None = None
    stub: Any = None


class FarMachines:
    """`shared`: a file that all machines have to see. `host_memory_root`: of this machine. `changed` is called where a
    machine comes or goes."""

    def __init__(
        self,
        machines: Machines,
        slots: Slots,
        *,
        shared: Path,
        host_memory_root: Path,
        changed: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """CertsError, OSError."""
        self._gate_root = machines.gate_root
        self._shared = shared
        self._changed = changed
        self._now_s = now_s
        self._log = structlog.get_logger("agent")
        of_all = ClusterSection.model_construct(
            nodes=slots.nodes, device=slots.device, slots_per_gpu=slots.per_gpu, addresses={}, machines=()
        )
        self._cluster = machines.section_of(of_all)
        self._tls = Credentials(Path(machines.credentials)) if machines.far else None
        if self._tls is not None:
            self._tls.warn_of_its_end()
        self._far = [_Far(each, now_s()) for each in machines.far]
        self._own_memory_id = host_memory_id(host_memory_root)

    async def gates(self) -> tuple[list[GateState], list[cluster_pb2.NodeAway]]:
        """The gates of all machines that are there, as they are now, and the nodes of the others."""
        asked = {each.section.name: each for each in self._far if not each.reason}
        found = dict(zip(asked, await asyncio.gather(*map(self._gates_of, asked.values())), strict=True))
        states = [state for own in found.values() if own is not None for state in own]
        # One that came back while the others were asked was not asked itself.
        unknown = [each for each in self._far if found.get(each.section.name) is None]
        away = [
            cluster_pb2.NodeAway(
                node=node,
                seconds=self._now_s() - each.away_s,
                reason=each.reason or "it is back",
                keeps_jobs=each.keeps_jobs,
            )
            for each in unknown
            for node in each.section.nodes
        ]
        return states, away

    async def machine_of(self, node: NodeId) -> cluster_pb2.GetNodeMachineResponse | None:
        """Without what it has where it is away. None: no other machine has the node. PeerUnavailable, PeerRefused."""
        for each in self._far:
            if node in each.section.nodes:
                found = cluster_pb2.GetNodeMachineResponse(name=each.section.name, agent=each.section.agent)
                if not each.reason:
                    found.machine.CopyFrom(await each.stub.GetMachine(machine_pb2.GetMachineRequest()))
                return found
        return None

    def names(self) -> dict[str, str]:
        """The machine of each node."""
        return {str(node): each.section.name for each in self._far for node in each.section.nodes}

    def memory(self) -> list[cluster_pb2.HostMemory]:
        """The host memory of the machines that have told it."""
        return [
            cluster_pb2.HostMemory(nodes=each.section.nodes, total_bytes=each.memory_bytes)
            for each in self._far
            if each.memory_bytes
        ]

    async def watch(self) -> None:
        """Asks for machines that are away, for ever."""
        await asyncio.gather(*map(self._watch, self._far))

    async def aclose(self) -> None:
        for each in self._far:
            if each.channels is not None:
                await each.channels.close()

    async def _watch(self, each: _Far) -> None:
        while True:
            if each.reason:
                await self._look_for(each)
            await asyncio.sleep(AGAIN_S)

    async def _gates_of(self, each: _Far) -> list[GateState] | None:
        """None: it does not answer."""
        try:
            return await self._asked(each)
        except _SILENT as error:
            self._note(each, _silence(error))
        except asyncio.CancelledError:
            # The call was cut off by a look on a new connection. Else this task itself is cancelled.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        return None

    async def _look_for(self, each: _Far) -> None:
        # A connection from before an outage of the network may stay silent for a minute after it.
        await self._connect(each)
        try:
            there = await each.stub.GetMachine(machine_pb2.GetMachineRequest(shared=str(self._shared)))
            each.memory_bytes, each.memory_id = there.host_memory.total_bytes, there.host_memory_id
            each.keeps_jobs = bool(release_fault(there, each.section))
            fault = machine_fault(there, each.section, self._cluster, shared=self._shared)
            if not fault:
                await self._asked(each)
                fault = self._twin_fault(each)
                self._refuse_twins(each)
        except _SILENT as error:
            fault = _silence(error)
            if each.keeps_jobs:
                each.keeps_jobs, each.away_s = False, self._now_s()  # until now it was there for its jobs
        self._note(each, fault)

    def _twin_fault(self, each: _Far) -> str:
        """Why it is not taken, where it is this machine or an earlier one that is there."""
        if each.memory_id == self._own_memory_id:
            return same_machine_fault(each.section.name, "the one that keeps the cluster")
        for other in self._far[: self._far.index(each)]:
            if not other.reason and other.memory_id == each.memory_id:
                return same_machine_fault(each.section.name, other.section.name)
        return ""

    def _refuse_twins(self, each: _Far) -> None:
        for other in self._far[self._far.index(each) + 1 :]:
            if not other.reason and other.memory_id == each.memory_id:
                self._note(other, same_machine_fault(other.section.name, each.section.name))

    async def _connect(self, each: _Far) -> None:
        assert self._tls is not None, "there are machines, so there is a credential for them"
        before, each.channels = each.channels, Channels(default_timeout_s=ANSWER_S, tls=self._tls)
        each.stub = stub_of(each.channels, each.section, self._tls.identity.cluster)
        if before is not None:
            await before.close()

    async def _asked(self, each: _Far) -> list[GateState]:
        request = machine_pb2.GetGatesRequest(root=self._gate_root, nodes=each.section.nodes)
        found = [decode_gate_state(state) for state in (await each.stub.GetGates(request)).gates]
        if others := [state.gpu for state in found if node_of(state.gpu) not in each.section.nodes]:
            raise WireError(f"it told the gate of {others[0]}, which is not its own")
        return found

    def _note(self, each: _Far, reason: str) -> None:
        before, each.reason = each.reason, reason
        if reason and not before:
            each.away_s = self._now_s()
        if _kind(before) != _kind(reason):
            self._log.info("machine is away" if reason else "machine is there", name=each.section.name, reason=reason)
        if before == _UNASKED or bool(before) != bool(reason):
            self._changed()


def _silence(error: PeerUnavailable | PeerRefused | WireError) -> str:
    return f"it does not answer: {error if isinstance(error, WireError) else error.reason}"


def _kind(reason: str) -> str:
    """Two silences are told with other details."""
    return reason.partition(":")[0] if reason.startswith("it does not answer") else reason
