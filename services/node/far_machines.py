"""The other machines of the cluster, as its agent sees them: which of them answer, and what their gates say.

A machine is away until it has answered and is as this one. One that does not answer a question in time is away from
then on. Those that are away are asked every `AGAIN_S`.

Invariants:
- The gates of a machine that is away are not told, as nothing on it counts as free. [test_far_machines: that_is_away]
- A machine that is not as this one is away, with the reason. [test_far_machines: of_another_version]
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
from tidegate.launcher.preflight import machine_fault
from tidegate.ownership.records import GateState
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.hosted import stub_of
from tidegate.v1 import cluster_pb2, machine_pb2

ANSWER_S = 2.0
"""A gate reads files of its own machine."""
AGAIN_S = 1.0
_UNASKED = "it was not asked yet"
_SILENT = (PeerUnavailable, PeerRefused, WireError)


@dataclass(slots=True)
class _Far:
    """`since_s`: when it was last heard of, or this agent began. `reason`: why it is away; empty: it is there."""

    section: MachineSection
    since_s: float
    reason: str = _UNASKED
    channels: Channels | None = None
    stub: Any = None


class FarMachines:
    """`changed` is called where a machine comes or goes."""

    def __init__(
        self,
        machines: Machines,
        slots: Slots,
        *,
        changed: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """CertsError."""
        self._gate_root = machines.gate_root
        self._changed = changed
        self._now_s = now_s
        self._log = structlog.get_logger("agent")
        of_all = ClusterSection.model_construct(nodes=slots.nodes, addresses={}, machines=())
        self._cluster = machines.section_of(of_all)
        self._tls = Credentials(Path(machines.credentials)) if machines.far else None
        self._far = [_Far(each, now_s()) for each in machines.far]

    async def gates(self) -> list[GateState]:
        """Of all machines that are there, as they are now."""
        there = [each for each in self._far if not each.reason]
        found = await asyncio.gather(*map(self._gates_of, there))
        return [state for states in found for state in states]

    def away(self) -> list[cluster_pb2.NodeAway]:
        """The nodes of the machines that are away, with the seconds since they were heard of."""
        return [
            cluster_pb2.NodeAway(node=node, seconds=self._now_s() - each.since_s, reason=each.reason)
            for each in self._far
            if each.reason
            for node in each.section.nodes
        ]

    async def watch(self) -> None:
        """Asks for machines that are away, for ever."""
        while True:
            await asyncio.gather(*(self._look_for(each) for each in self._far if each.reason))
            await asyncio.sleep(AGAIN_S)

    async def aclose(self) -> None:
        for each in self._far:
            await _disconnect(each)

    async def _gates_of(self, each: _Far) -> list[GateState]:
        try:
            found = await self._asked(each)
        except _SILENT as error:
            self._note(each, f"it does not answer: {error}")
            return []
        each.since_s = self._now_s()
        return found

    async def _look_for(self, each: _Far) -> None:
        # A connection from before an outage of the network may stay silent for a minute after it.
        await self._connect(each)
        try:
            fault = await machine_fault(each.stub, each.section, self._cluster)
            if not fault:
                await self._asked(each)
        except _SILENT as error:
            fault = f"it does not answer: {error}"
        self._note(each, fault)

    async def _connect(self, each: _Far) -> None:
        assert self._tls is not None, "there are machines, so there is a credential for them"
        await _disconnect(each)
        each.channels = Channels(default_timeout_s=ANSWER_S, tls=self._tls)
        each.stub = stub_of(each.channels, each.section, self._tls.identity.cluster)

    async def _asked(self, each: _Far) -> list[GateState]:
        request = machine_pb2.GetGatesRequest(root=self._gate_root, nodes=each.section.nodes)
        return [decode_gate_state(state) for state in (await each.stub.GetGates(request)).gates]

    def _note(self, each: _Far, reason: str) -> None:
        before, each.reason = each.reason, reason
        if not reason:
            each.since_s = self._now_s()
        if before == _UNASKED or bool(before) != bool(reason):
            self._log.info("machine is away" if reason else "machine is there", name=each.section.name, reason=reason)
            self._changed()


async def _disconnect(each: _Far) -> None:
    if each.channels is not None:
        await each.channels.close()
