"""Other machines as a cluster's agent sees them: agents on loopback, with real gates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.node import far_machines
from services.node.far_machines import FarMachines
from services.node.machine import MachineServicer
from tidegate.adapters.grpc_server import RpcServer, Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.machines import Machines, machine_of
from tidegate.cluster.slots import Slots
from tidegate.gate import Gate
from tidegate.machines import versions
from tidegate.types import LOOPBACK, GpuId, Grant, NodeId, Token
from tidegate.v1 import machine_pb2, machine_pb2_grpc

N1 = NodeId("n1")
SLOTS = Slots({NodeId("n0"): 2, N1: 2})
HELD = Grant(GpuId("n1/0"), Token(1, 1))


class _Servicer(MachineServicer):
    """`answers`: until it is set, questions for gates wait."""

    def __init__(self, memory: Path) -> None:
        super().__init__(None, memory)
        self.answers = asyncio.Event()
        self.answers.set()

    async def GetGates(self, request: machine_pb2.GetGatesRequest, context: Any) -> machine_pb2.GetGatesResponse:
        await self.answers.wait()
        return await super().GetGates(request, context)


@dataclass
class Lab:
    """The agent of machine `b` with node n1, and what the cluster's agent sees of it."""

    folder: Path
    servicer: _Servicer
    server: RpcServer
    seen: FarMachines = field(init=False)
    changes: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    now_s: float = 0.0

    def look(self, agent: str | None = None) -> FarMachines:
        far = machine_of("b", agent or self.server.endpoint, [N1])
        machines = Machines("10.0.0.7", str(self.folder / "operator"), str(self.folder / "gates"), (far,))
        return FarMachines(machines, SLOTS, changed=lambda: self.changes.put_nowait(None), now_s=lambda: self.now_s)

    async def serve(self, address: str) -> None:
        served = Service(
            machine_pb2.DESCRIPTOR.services_by_name["Machine"],
            lambda server: machine_pb2_grpc.add_MachineServicer_to_server(self.servicer, server),
        )
        self.server = await serve([served], address, tls=Credentials(self.folder / "node"))


@asynccontextmanager
async def watched(seen: FarMachines) -> AsyncIterator[FarMachines]:
    task = asyncio.create_task(seen.watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await seen.aclose()


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr(far_machines, "AGAIN_S", 0.02)
    monkeypatch.setattr(far_machines, "ANSWER_S", 0.5)
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.NODE, "b"), tmp_path / "node")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    found = Lab(tmp_path, _Servicer(tmp_path), server=None)  # type: ignore[arg-type]  # it is made in a moment
    await found.serve(f"{LOOPBACK}:0")
    yield found
    found.servicer.answers.set()
    await found.server.stop(grace_s=0.0)


async def test_the_gates_of_a_machine_that_is_there_are_told_as_they_are_now(lab: Lab) -> None:
    async with watched(lab.look()) as seen:
        await lab.changes.get()
        assert not seen.away()
        assert await seen.gates() == []
        hold = Gate(lab.folder / "gates" / N1).acquire(HELD)
        (state,) = await seen.gates()
        assert (state.gpu, state.highest_token, state.held) == (HELD.gpu, HELD.token, True)
        hold.close()
        assert [state.held for state in await seen.gates()] == [False]


async def test_a_machine_that_is_away_has_no_gates_and_its_nodes_are_named_with_the_time(lab: Lab) -> None:
    async with watched(lab.look()) as seen:
        (away,) = seen.away()
        assert (away.node, away.reason) == ("n1", "it was not asked yet")
        await lab.changes.get()
        assert not seen.away()
        endpoint = lab.server.endpoint
        await lab.server.stop(grace_s=0.0)
        lab.now_s = 7.0
        assert await seen.gates() == []
        (away,) = seen.away()
        assert (away.node, away.seconds) == ("n1", 7.0)
        assert "it does not answer" in away.reason
        await lab.changes.get()
        await lab.serve(endpoint)
        await lab.changes.get()
        assert not seen.away()


async def test_who_asks_for_gates_waits_for_no_machine_that_is_away(lab: Lab) -> None:
    async with watched(lab.look()) as seen:
        await lab.changes.get()
        lab.servicer.answers.clear()
        await seen.gates()
        assert seen.away()
        # It still hangs: an answer after that would take half a second.
        async with asyncio.timeout(0.2):
            assert await seen.gates() == []


async def test_a_machine_of_another_version_is_away_and_says_which(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    own = versions()
    monkeypatch.setattr("services.node.machine.versions", lambda: own | {"torch": "0.1"})
    async with watched(lab.look()) as seen:
        await lab.changes.get()
        (away,) = seen.away()
        assert "cluster.machines: b has torch 0.1" in away.reason
        monkeypatch.setattr("services.node.machine.versions", lambda: own)
        await lab.changes.get()
        assert not seen.away()
