"""A machine that lends its nodes to a job, with trivial processes in place of services."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from services.node.job_memories import MARK
from services.node.machine import MachineServicer
from services.node.machine_left import MachineLeft
from tests.unit.cli.configs import small
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import RpcServer, Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CREDENTIAL
from tidegate.certs.identity import Identity, Party
from tidegate.certs.job_credentials import credential_folder
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.job import JobFolder
from tidegate.launcher.claim import host_memory_folder, write_private
from tidegate.runtime.hosted import Hosted
from tidegate.runtime.processes import Child, ServiceSpec, started
from tidegate.types import LOOPBACK, NodeId, Role
from tidegate.v1 import machine_pb2, machine_pb2_grpc

WAITS = "import time\nwhile True: time.sleep(60)"
ENDS_ON_TERM = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(7))
print("ready", flush=True)
while True: time.sleep(60)
"""
IGNORES_TERM = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\n" + WAITS


@dataclass
class Lab:
    """A job's folder, the credentials of a cluster, and the agent of machine `b`, whose processes run `code`."""

    folder: Path
    code: str = WAITS
    server: RpcServer = field(init=False)
    stand_ins: list[asyncio.subprocess.Process] = field(default_factory=list)

    def program(self, spec: ServiceSpec) -> Child:
        return started(replace(spec, command=(sys.executable, "-c", self.code)))

    def config(self, **cluster: Any) -> JobConfig:
        """As the launcher resolves it."""
        raw = small(self.folder)
        nodes = {"nodes": {"n0": 3}, "component_placement": {"actor": 0, "rollout": 1, "inference": 2}}
        machines = [{"name": "b", "agent": self.server.endpoint, "nodes": ["n0"]}]
        own = {
            "addresses": {"n0": LOOPBACK},
            "machines": machines,
            "machine_credentials": str(self.folder / "operator"),
        }
        raw["cluster"] = nodes | own | cluster
        raw["runtime"]["gate_root"] = str(self.folder / "gates")
        config = parse_config(raw)
        memory = {"host_memory_root": str(host_memory_folder(config))}
        return config.model_copy(update={"runtime": config.runtime.model_copy(update=memory)})

    def hosted(self, config: JobConfig, role: Role | None = Role.ACTOR) -> Hosted:
        job = JobFolder.of(config)
        job.root.mkdir(parents=True, exist_ok=True)
        write_private(job.config, config.to_json())
        # Launcher and agent have one file system here: the agent takes the launcher's folder for its own old one.
        memory = Path(config.runtime.host_memory_root)
        own = credential_folder(memory, Party.JOB)
        own.mkdir(parents=True, exist_ok=True)
        (memory / MARK).touch()
        write_private(own / CREDENTIAL, "secret")
        return Hosted(job.config, NodeId("n0"), role, job.root / "actor@n0.out")

    def printed(self, config: JobConfig) -> str:
        log = JobFolder.of(config).root / "actor@n0.out"
        return log.read_text() if log.exists() else ""

    async def serve(
        self, address: str = f"{LOOPBACK}:0", *, credentials: str = "node", left: MachineLeft | None = None
    ) -> RpcServer:
        servicer = MachineServicer(self.program, self.folder / "memory", left=left)
        served = Service(
            machine_pb2.DESCRIPTOR.services_by_name["Machine"],
            lambda server: machine_pb2_grpc.add_MachineServicer_to_server(servicer, server),
        )
        return await serve([served], address, tls=Credentials(self.folder / credentials))

    async def stand_in(self, config: JobConfig) -> asyncio.subprocess.Process:
        return await self.started(self.hosted(config))

    async def started(self, hosted: Hosted) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", *hosted.command())
        found = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        self.stand_ins.append(found)
        return found


def programs_of(agent: psutil.Process, code: str) -> list[psutil.Process]:
    """Those children of an agent that run `code`. Until its exec a child has the words of its parent."""
    found = []
    for each in agent.children():
        with suppress(psutil.Error):  # it has just ended
            found += [each] if each.cmdline()[1:] == ["-c", code] else []
    return found


async def requests(start: machine_pb2.ProcessStart, *, stays: bool) -> AsyncIterator[machine_pb2.RunProcessRequest]:
    yield machine_pb2.RunProcessRequest(start=start)
    if stays:
        await asyncio.Event().wait()


async def calls(
    lab: Lab, start: machine_pb2.ProcessStart, *, stays: bool = False, who: str = "operator"
) -> AsyncGenerator[machine_pb2.RunProcessResponse]:
    channels = Channels(default_timeout_s=30, tls=Credentials(lab.folder / who))
    stub: Any = machine_pb2_grpc.MachineStub(channels.connect(lab.server.endpoint, Identity("lab", Party.NODE, "b")))
    try:
        async for response in stub.RunProcess(requests(start, stays=stays), timeout=30):
            yield response
    finally:
        await channels.close()
