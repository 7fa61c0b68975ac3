"""Other machines as a cluster's agent sees them: agents on loopback, with real gates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.node import far_machines
from services.node.far_machines import FarMachines
from services.node.jobs import NodeJobs
from services.node.machine import MachineServicer
from services.node.servicer import NodeServicer, Version
from tidegate.adapters.grpc_server import RpcServer, Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.machines import Machines, far_machine
from tidegate.cluster.slots import Slots
from tidegate.codec import encode_gate_state
from tidegate.gate import Gate, GateState
from tidegate.machines import versions
from tidegate.runtime.cuda import CudaDevice
from tidegate.runtime.processes import Supervisor
from tidegate.types import LOOPBACK, GpuId, Grant, NodeId, Token
from tidegate.v1 import cluster_pb2, machine_pb2, machine_pb2_grpc

N1, N2 = NodeId("n1"), NodeId("n2")
SLOTS = Slots({NodeId("n0"): 2, N1: 2, N2: 2})
HELD = Grant(GpuId("n1/0"), Token(1, 1))


class _Servicer(MachineServicer):
    """`answers`: until it is set, questions for gates wait. `more`: what it tells besides its own gates."""

    def __init__(self, memory: Path) -> None:
        self.devices: list[CudaDevice] = []
        super().__init__(None, memory, self.devices)
        self.answers = asyncio.Event()
        self.answers.set()
        self.was_asked = asyncio.Event()
        self.more: list[GateState] = []

    async def GetGates(self, request: machine_pb2.GetGatesRequest, context: Any) -> machine_pb2.GetGatesResponse:
        self.was_asked.set()
        await self.answers.wait()
        found = await super().GetGates(request, context)
        found.gates.extend(map(encode_gate_state, self.more))
        return found


@dataclass
class Agent:
    """That of one machine, with one node."""

    folder: Path
    name: str
    node: NodeId
    servicer: _Servicer
    server: RpcServer | None = None
    endpoint: str = f"{LOOPBACK}:0"

    async def serve(self) -> None:
        """Again at the address where it was."""
        served = Service(
            machine_pb2.DESCRIPTOR.services_by_name["Machine"],
            lambda server: machine_pb2_grpc.add_MachineServicer_to_server(self.servicer, server),
        )
        self.server = await serve([served], self.endpoint, tls=Credentials(self.folder / self.name))
        self.endpoint = self.server.endpoint

    async def stop(self) -> None:
        self.servicer.answers.set()
        if self.server is not None:
            await self.server.stop(grace_s=0.0)


@dataclass
class Lab:
    """The agents of two machines, and what a cluster's agent sees of them."""

    folder: Path
    b: Agent
    c: Agent
    changes: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    now_s: float = 0.0

    def look(self, *agents: Agent, slots: Slots = SLOTS) -> FarMachines:
        far = tuple(far_machine(each.name, each.endpoint, [each.node]) for each in agents)
        return FarMachines(
            Machines("10.0.0.7", str(self.folder / "operator"), str(self.folder / "gates"), far),
            slots,
            shared=self.folder / "shared",
            host_memory_root=self.folder / "memory-a",
            changed=lambda: self.changes.put_nowait(None),
            now_s=lambda: self.now_s,
        )

    async def away(self, seen: FarMachines) -> dict[str, str]:
        """The reason by node."""
        return {each.node: each.reason for each in (await seen.gates())[1]}


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
    # Long enough for a busy machine. Who waits for a silence takes less.
    monkeypatch.setattr(far_machines, "ANSWER_S", 10.0)
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    for name in ("gates", "memory-a"):
        (tmp_path / name).mkdir()
    (tmp_path / "shared").touch()
    agents = []
    for name, node in (("b", N1), ("c", N2)):
        authority.issue(Identity("lab", Party.NODE, name), tmp_path / name)
        (tmp_path / f"memory-{name}").mkdir()
        agents.append(Agent(tmp_path, name, node, _Servicer(tmp_path / f"memory-{name}")))
        await agents[-1].serve()
    b, c = agents
    yield Lab(tmp_path, b, c)
    for each in agents:
        await each.stop()


async def test_the_gates_of_a_machine_that_is_there_are_told_as_they_are_now(lab: Lab) -> None:
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        assert await seen.gates() == ([], [])
        hold = Gate(lab.folder / "gates" / N1).acquire(HELD)
        ((state,), _) = await seen.gates()
        assert (state.gpu, state.highest_token, state.held) == (HELD.gpu, HELD.token, True)
        hold.close()
        assert [state.held for state in (await seen.gates())[0]] == [False]


async def test_a_machine_that_is_away_has_no_gates_and_its_nodes_are_named_with_the_time(lab: Lab) -> None:
    async with watched(lab.look(lab.b)) as seen:
        assert await lab.away(seen) == {"n1": "it was not asked yet"}
        await lab.changes.get()
        Gate(lab.folder / "gates" / N1).acquire(HELD).close()
        await lab.b.stop()
        lab.now_s = 50.0
        states, (away,) = await seen.gates()
        assert states == []
        assert (away.node, away.seconds) == ("n1", 0.0), "nobody had asked it for long, and it was there"
        assert away.reason.startswith("it does not answer: ")
        assert "tidegate.v1" not in away.reason
        lab.now_s = 57.0
        assert (await seen.gates())[1][0].seconds == 7.0
        await lab.changes.get()
        await lab.b.serve()
        await lab.changes.get()
        assert not await lab.away(seen)


async def test_a_machine_that_comes_back_while_another_is_asked_is_still_away_in_that_answer(lab: Lab) -> None:
    """Else its slots would be neither held nor away, and so free."""
    await lab.c.stop()
    async with watched(lab.look(lab.b, lab.c)) as seen:
        for _ in range(2):
            await lab.changes.get()
        Gate(lab.folder / "gates" / N2).acquire(replace(HELD, gpu=GpuId("n2/0")))
        lab.b.servicer.answers.clear()
        lab.b.servicer.was_asked.clear()
        asking = asyncio.create_task(seen.gates())
        await lab.b.servicer.was_asked.wait()
        await lab.c.serve()
        await lab.changes.get()
        lab.b.servicer.answers.set()
        states, away = await asking
        assert (states, [each.node for each in away]) == ([], ["n2"])
        assert [state.held for state in (await seen.gates())[0]] == [True]


async def test_who_asks_for_gates_waits_for_no_machine_that_is_away(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_machines, "ANSWER_S", 0.5)
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        lab.b.servicer.answers.clear()
        assert [*await lab.away(seen)] == ["n1"]
        # It still hangs: an answer after that would take half a second.
        async with asyncio.timeout(0.2):
            assert [*await lab.away(seen)] == ["n1"]


async def test_a_machine_of_another_version_is_away_and_says_which(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    own = versions()
    monkeypatch.setattr("tidegate.runtime.inventory.versions", lambda: own | {"torch": "0.1"})
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        assert "cluster.machines: b has torch 0.1" in (await lab.away(seen))["n1"]
        monkeypatch.setattr("tidegate.runtime.inventory.versions", lambda: own)
        await lab.changes.get()
        assert not await lab.away(seen)


async def test_a_machine_of_another_release_keeps_its_jobs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    own = versions()
    monkeypatch.setattr("tidegate.runtime.inventory.versions", lambda: own | {"torch": "0.1"})
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        assert [each.keeps_jobs for each in (await seen.gates())[1]] == [True]
        lab.now_s = 300.0
        await lab.b.stop()
        async with asyncio.timeout(30):
            while "it does not answer" not in (await lab.away(seen))["n1"]:  # noqa: ASYNC110 # it is away all the time
                await asyncio.sleep(0.02)
        lab.now_s = 310.0
        (away,) = (await seen.gates())[1]
        assert (away.keeps_jobs, away.seconds) == (False, 10.0), "it was there for its jobs until it was silent"


async def test_of_two_agents_on_one_machine_the_later_one_is_away_while_the_other_is_there(lab: Lab) -> None:
    for each in (lab.b, lab.c):
        each.servicer = _Servicer(lab.folder)
        await each.stop()
    await lab.c.serve()
    async with watched(lab.look(lab.b, lab.c)) as seen:
        while [*await lab.away(seen)] != ["n1"]:
            await lab.changes.get()
        await lab.b.serve()
        while [*await lab.away(seen)] != ["n2"]:
            await lab.changes.get()
        assert "c is the same machine as b" in (await lab.away(seen))["n2"]
        await lab.b.stop()
        while [*await lab.away(seen)] != ["n1"]:
            await lab.changes.get()


async def test_an_agent_on_the_keepers_own_machine_is_away(lab: Lab) -> None:
    lab.b.servicer = _Servicer(lab.folder / "memory-a")
    await lab.b.stop()
    await lab.b.serve()
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        assert "b is the same machine as the one that keeps the cluster" in (await lab.away(seen))["n1"]


async def test_an_agent_that_does_not_name_its_host_memory_is_of_an_earlier_release(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.runtime.inventory.host_memory_id", lambda _: "")
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        assert "its agent is of an earlier release" in (await lab.away(seen))["n1"]


async def test_a_machine_without_the_gpus_of_its_slots_is_away_until_it_has_them(lab: Lab) -> None:
    devices, gpu = lab.b.servicer.devices, CudaDevice("H200", 141 << 30)
    async with watched(lab.look(lab.b, slots=Slots(SLOTS.nodes, "cuda"))) as seen:
        await lab.changes.get()
        told = (await lab.away(seen))["n1"]
        assert told == "cluster.machines: b: its agent lends no CUDA device: start it with tidegate agent --device cuda"
        devices.append(gpu)
        while "n1 has 2 slots" not in told:
            await asyncio.sleep(0.01)
            told = (await lab.away(seen))["n1"]
        devices.append(gpu)
        await lab.changes.get()
        assert not await lab.away(seen)
        there = await seen.machine_of(N1)
        assert there is not None
        assert [each.name for each in there.machine.cuda_devices] == ["H200", "H200"]


@pytest.mark.parametrize(
    ("missing", "told"),
    [("shared", "mount the disk with the jobs' folder there"), ("gates", "gates for gates: make it, on a local disk")],
)
async def test_a_machine_without_a_folder_that_jobs_need_is_away_until_it_is_there(
    lab: Lab, missing: str, told: str
) -> None:
    path = lab.folder / missing
    path.rename(lab.folder / "aside")
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        assert told in (await lab.away(seen))["n1"]
        (lab.folder / "aside").rename(path)
        await lab.changes.get()
        assert not await lab.away(seen)


async def test_a_machine_that_tells_a_gate_of_another_machine_is_away(lab: Lab) -> None:
    async with watched(lab.look(lab.b)) as seen:
        await lab.changes.get()
        lab.b.servicer.more = [GateState(GpuId("n0/0"), Token(9, 9), held=False)]
        states, (away,) = await seen.gates()
        assert states == []
        assert "it told the gate of n0/0, which is not its own" in away.reason


async def test_the_agents_answer_has_the_gates_of_all_machines_and_names_those_that_are_away(lab: Lab) -> None:
    await lab.c.stop()
    async with watched(lab.look(lab.b, lab.c)) as seen:
        for _ in range(2):
            await lab.changes.get()
        own = Gate(lab.folder / "own" / "n0")
        held = [own.acquire(replace(HELD, gpu=GpuId("n0/1"))), Gate(lab.folder / "gates" / N1).acquire(HELD)]
        servicer = NodeServicer(SLOTS, {NodeId("n0"): own}, seen, Version(1), host_memory_root=lab.folder)
        servicer.jobs = NodeJobs(ClusterFolder.of(lab.folder), Supervisor(), prepare=None, leave=None, changed=None)  # type: ignore[arg-type]  # no job is started
        answer = await servicer.GetNode(cluster_pb2.GetNodeRequest(), None)
        assert sorted(state.gpu for state in answer.gates if state.held) == ["n0/1", "n1/0"]
        assert [each.node for each in answer.away] == ["n2"]
        far = await servicer.GetMachineOfNode(cluster_pb2.GetNodeMachineRequest(node="n1"), None)
        assert (far.name, far.agent, dict(far.machine.versions)) == ("b", lab.b.endpoint, versions())
        near = (await servicer.GetMachineOfNode(cluster_pb2.GetNodeMachineRequest(node="n0"), None)).machine
        assert near.host_memory_root == str(lab.folder)
        assert near.memory.total_bytes > near.memory.available_bytes > 0
        away = await servicer.GetMachineOfNode(cluster_pb2.GetNodeMachineRequest(node="n2"), None)
        assert (away.name, away.HasField("machine")) == ("c", False)
        for each in held:
            each.close()


@pytest.mark.parametrize(("days", "num_warnings"), [(14, 1), (15, 0)])
async def test_a_credential_for_other_machines_that_ends_soon_is_warned_of(
    lab: Lab, days: int, num_warnings: int
) -> None:
    operator = lab.folder / "operator"
    Authority.load(lab.folder / "ca").issue(Identity("lab", Party.OPERATOR, "me"), operator, days=days)
    with capture_logs() as lines:
        lab.look(lab.b, lab.c)
    found = [line["message"] for line in lines if line["event"] == "credential ends soon"]
    assert len(found) == num_warnings
    assert all(f"certs issue operator me --authority AUTHORITY --to {operator}" in each for each in found)
