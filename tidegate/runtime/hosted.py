"""A process of a job on another machine, as a child of the launcher.

    python -m tidegate.runtime.hosted --node NODE [--role ROLE] --config PATH --log PATH

It asks the machine's agent to run the process, and is its stand-in here: asked to stop it asks there, it ends with the
process's status, and with a message where the agent is gone. It asks an agent that does not answer again and again.
When it dies, the call ends, and with it the process.

Invariants:
- It ends as the process does. [test_machine: ends_with_the_status_of_its_process]
- Where the agent is gone it says so, and ends with status 1. [test_machine: an_agent_that_is_gone]
- Where the agent takes its program anew, it goes on with the process. [test_machine_reload: goes_on_with_its_process]
- It waits for an agent that is not there yet, and ends for good where it is refused. [test_machine: waits_for_an_agent]
  [test_machine: a_refusal_ends]
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
from tidegate.certs.job_credentials import job_folders
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.sections.job import MachineSection
from tidegate.machines import BEAT_S, LOST_S, own_modules, release
from tidegate.runtime.processes import ENDS_AGAIN
from tidegate.runtime.service import stop_signal
from tidegate.types import NodeId, Role
from tidegate.v1 import machine_pb2, machine_pb2_grpc

_LIFE_S = 1e7
"""Every call has a deadline: four months. After it the stand-in is started again."""
AGAIN_S = 2.0
AWAY_S = 900.0
"""How often an agent is asked that does not answer, and for how long: a machine may start anew meanwhile."""
_KEPT_AGAIN_S = 0.2
"""How often an agent is asked that takes its program anew."""
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class Hosted:
    """What runs there: an instance of a role on a node, or the node's fork server."""

    config: Path
    node: NodeId
    role: Role | None
    log: Path

    def start(self, memory: Path) -> machine_pb2.ProcessStart:
        """With the credentials of the job's processes. The others, and the scheduler's, stay here."""
        files = sorted(path for folder in job_folders(memory) if folder.is_dir() for path in folder.iterdir())
        return machine_pb2.ProcessStart(
            node=self.node,
            role=self.role or "",
            config=str(self.config),
            log=str(self.log),
            files={str(path.relative_to(memory)): path.read_bytes() for path in files},
            release=release(),
            python=sys.executable,
            modules=own_modules(),
        )

    def command(self) -> tuple[str, ...]:
        role = ("--role", self.role) if self.role else ()
        words = ("--node", self.node, *role, "--config", str(self.config), "--log", str(self.log))
        return ("tidegate.runtime.hosted", *words)


def stub_of(channels: Channels, machine: MachineSection, cluster: str) -> Any:
    """The stub of a machine's agent, whose credential is of this cluster."""
    return machine_pb2_grpc.MachineStub(channels.connect(machine.agent, Identity(cluster, Party.NODE, machine.name)))


async def run(hosted: Hosted, config: JobConfig) -> int:
    """The exit status of the process there, negative for a signal. 1 where the agent is gone, and `ENDS_AGAIN` where it
    refuses or does not come within `AWAY_S`."""
    tls = Credentials(Path(config.cluster.machine_credentials))
    machine = config.cluster.machine_of(hosted.node)
    assert machine is not None, "stand-ins are for nodes of other machines alone"
    stopping = await stop_signal()
    start = hosted.start(Path(config.runtime.host_memory_root))
    loop = asyncio.get_running_loop()
    gives_up_s, is_told = loop.time() + AWAY_S, False
    while True:
        channels = Channels(default_timeout_s=_LIFE_S, tls=tls)
        call = Call()
        try:
            stub = stub_of(channels, machine, tls.identity.cluster)
            responses = stub.RunProcess(_requests(start, stopping), timeout=_LIFE_S)
            return await call.status(responses, hosted.log)
        except TimeoutError:
            why, is_final = f"silent for {LOST_S:g} s", False
        except grpc.aio.AioRpcError as error:
            why, is_final = str(error.details()), error.code() in _REFUSALS
        finally:
            await channels.close()
        if call.kept_s:
            start.kept_pid, gives_up_s = call.pid, loop.time() + call.kept_s
            continue
        is_over = is_final or loop.time() > gives_up_s
        if start.kept_pid and not call.pid and not is_over:
            await asyncio.sleep(_KEPT_AGAIN_S)
            continue
        if not is_told or is_over:
            print(f"the agent of {machine.name} at {machine.agent}: {why}", file=sys.stderr, flush=True)
            is_told = True
        if call.pid or start.kept_pid:
            return 1
        if is_over or stopping.is_set():
            return ENDS_AGAIN
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), AGAIN_S)


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


class Call:
    """One call, until the process has ended. `pid`: of the process, once it runs. `kept_s`: the agent takes its program
    anew, and another call goes on with the process within this time."""

    def __init__(self) -> None:
        self.pid = 0
        self.kept_s = 0

    async def status(self, responses: Any, log: Path) -> int:
        """TimeoutError after `LOST_S` of silence. AioRpcError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LOST_S) as patience:
            async for response in responses:
                patience.reschedule(loop.time() + LOST_S)
                body = response.WhichOneof("body")
                if body == "started":
                    self.pid = response.started.pid
                elif body == "kept":
                    self.kept_s = response.kept.seconds
                    raise TimeoutError  # the end of this call tells that it was read
                elif body == "ended":
                    status = int(response.ended.exit_status)
                    if status > 0:
                        print(_last_line(log), file=sys.stderr)
                    return status
        print("the agent ended the call without a status: it had heard nothing from here", file=sys.stderr)
        return 1


def _last_line(log: Path) -> str:
    with suppress(OSError):
        return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    return ""


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
    except (CertsError, ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return ENDS_AGAIN
    if status < 0:
        with suppress(OSError):  # it cannot be set for SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
