"""A process of a job on another machine, as a child of the launcher.

    python -m tidegate.runtime.hosted --node NODE [--role ROLE] --config PATH --log PATH

It asks the machine's agent to run the process, and is its stand-in here: asked to stop it asks there, it ends with the
process's status, and with a message where the agent is gone. When it dies, the call ends, and with it the process.

Invariants:
- It ends as the process does. [test_machine: ends_with_the_status_of_its_process]
- Where the agent is gone it says so, and ends with status 1. [test_machine: an_agent_that_is_gone]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Identity, Party
from tidegate.certs.job_credentials import credential_folder
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.job import MachineSection
from tidegate.machines import BEAT_S, LOST_S
from tidegate.runtime.service import stop_signal
from tidegate.types import NodeId, Role
from tidegate.v1 import machine_pb2, machine_pb2_grpc

_LIFE_S = 1e7
"""Every call has a deadline. A job is shorter than four months, and this process is started again after it."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """What runs there: an instance of a role on a node, or the node's fork server."""

    config: Path
    node: NodeId
    role: Role | None
    log: Path

    def start(self, memory: Path) -> machine_pb2.ProcessStart:
        """With the credential of the job's processes. The others, and the scheduler's, stay here."""
        files = sorted(credential_folder(memory, Party.JOB).iterdir())
        return machine_pb2.ProcessStart(
            node=self.node,
            role=self.role or "",
            config=str(self.config),
            log=str(self.log),
            files={str(path.relative_to(memory)): path.read_bytes() for path in files},
        )

    def command(self) -> tuple[str, ...]:
        role = ("--role", self.role) if self.role else ()
        words = ("--node", self.node, *role, "--config", str(self.config), "--log", str(self.log))
        return ("tidegate.runtime.hosted", *words)


def stub_of(channels: Channels, machine: MachineSection, cluster: str) -> Any:
    """The stub of a machine's agent, whose credential is of this cluster."""
    return machine_pb2_grpc.MachineStub(channels.connect(machine.agent, Identity(cluster, Party.NODE, machine.name)))


async def run(hosted: Hosted, config: JobConfig) -> int:
    """The exit status of the process there, negative for a signal; 1 where it could not be run."""
    tls = Credentials(Path(config.cluster.machine_credentials))
    machine = config.cluster.machine_of(hosted.node)
    assert machine is not None, "the launcher runs the nodes of no other machine itself"
    channels = Channels(default_timeout_s=_LIFE_S, tls=tls)
    stopping = await stop_signal()
    start = hosted.start(Path(config.runtime.host_memory_root))
    try:
        stub = stub_of(channels, machine, tls.identity.cluster)
        call = stub.RunProcess(_requests(start, stopping), timeout=_LIFE_S)
        return await _status(call)
    except TimeoutError:
        print(f"the agent of {machine.name} at {machine.agent} is silent for {LOST_S:g} s", file=sys.stderr)
    except grpc.aio.AioRpcError as error:
        print(f"the agent of {machine.name} at {machine.agent}: {error.details()}", file=sys.stderr)
    finally:
        await channels.close()
    return 1


async def _requests(
    start: machine_pb2.ProcessStart, stopping: asyncio.Event
) -> AsyncIterator[machine_pb2.RunProcessRequest]:
    yield machine_pb2.RunProcessRequest(start=start)
    is_asked = False
    while True:
        if is_asked:
            await asyncio.sleep(BEAT_S)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), BEAT_S)
        if stopping.is_set() and not is_asked:
            is_asked = True
            yield machine_pb2.RunProcessRequest(stop=machine_pb2.ProcessStop())
        else:
            yield machine_pb2.RunProcessRequest(beat=machine_pb2.Beat())


async def _status(call: Any) -> int:
    """TimeoutError after `LOST_S` of silence. AioRpcError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LOST_S) as patience:
        async for response in call:
            patience.reschedule(loop.time() + LOST_S)
            if response.WhichOneof("body") == "ended":
                return int(response.ended.exit_status)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tidegate.runtime.hosted")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node", type=NodeId, required=True)
    parser.add_argument("--role", type=Role)
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    hosted = Hosted(args.config, args.node, args.role, args.log)
    try:
        status = asyncio.run(run(hosted, JobConfig.read(hosted.config)))
    except CertsError as error:
        print(error, file=sys.stderr)
        return 1
    if status < 0:
        with suppress(OSError):  # it cannot be set for SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
