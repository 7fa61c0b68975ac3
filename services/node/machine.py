"""The agent of a machine that lends its nodes to jobs which are started elsewhere.

    tidegate agent --listen HOST:PORT --credentials FOLDER [--host-memory-root FOLDER]

It runs a fork server and three instances for each of a job's nodes here, and nothing else: a caller names a node and a
role, and the agent makes the command. The job's config and logs are on storage that all machines share. Its folder in
host memory, with its credentials, is this machine's: the first process of the job makes it, the last one removes it.

Invariants:
- A process lives as long as the call that started it. [test_machine: ends_with_its_call]
- Who calls and is silent for `LOST_S` is gone. [test_machine: a_silent_caller]
- Nothing is written but the job's credential in host memory, and the log. [test_machine: nothing_is_written_outside]
- A request that cannot run here is refused with the reason, and leaves nothing. [test_machine: what_cannot_run_here]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import structlog

from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import credential_folder
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.job import JobFolder
from tidegate.launcher.services import FORKED, fork_server_env, forkserver_command, service_env
from tidegate.logs import configure_logging
from tidegate.machines import BEAT_S, LOST_S, fork_server_socket, versions
from tidegate.runtime.interfaces import NotThisMachine, addresses_here, interface_of
from tidegate.runtime.processes import ServiceSpec, StartChild, Supervisor
from tidegate.runtime.service import STOP_GRACE_S, stop_signal
from tidegate.runtime.spawner import Spawner
from tidegate.types import NodeId, Role
from tidegate.v1 import machine_pb2, machine_pb2_grpc

_STOP_S = 10.0
Requests = AsyncIterator[machine_pb2.RunProcessRequest]


class MachineServicer(machine_pb2_grpc.MachineServicer):
    def __init__(self, start_child: StartChild | None, host_memory_root: Path) -> None:
        self._start_child = start_child
        self._memory = _JobMemories(host_memory_root)
        self._log = structlog.get_logger("agent")

    async def GetMachine(self, request: machine_pb2.GetMachineRequest, context: Any) -> machine_pb2.GetMachineResponse:
        return machine_pb2.GetMachineResponse(versions=versions(), user=os.getuid(), addresses=addresses_here())

    async def RunProcess(self, requests: Requests, context: Any) -> AsyncIterator[machine_pb2.RunProcessResponse]:
        first = await anext(aiter(requests))
        start = first.start
        config = _config_of(start)
        spec = _spec_of(start, config)
        with self._memory.of_job(Path(config.runtime.host_memory_root), start.files):
            supervisor = Supervisor(self._start_child)
            try:
                pid = supervisor.start(spec)
                self._log.info("process started", job=config.job, name=spec.name, pid=pid)
                yield machine_pb2.RunProcessResponse(started=machine_pb2.ProcessStarted(pid=pid))
                async for response in _until_ended(supervisor, spec.name, requests):
                    yield response
            finally:
                await supervisor.aclose()
                self._log.info("process gone", job=config.job, name=spec.name)


async def _until_ended(
    supervisor: Supervisor, name: str, requests: Requests
) -> AsyncIterator[machine_pb2.RunProcessResponse]:
    """Beats, and at last the end. It returns without one once the caller is gone."""
    ended = asyncio.create_task(supervisor.next_end())
    listening = asyncio.create_task(_listen(supervisor, name, requests))
    try:
        while True:
            await asyncio.wait({ended, listening}, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                status = ended.result().exit_status
                yield machine_pb2.RunProcessResponse(ended=machine_pb2.ProcessEnded(exit_status=status))
                return
            if listening.done():
                return
            yield machine_pb2.RunProcessResponse(beat=machine_pb2.Beat())
    finally:
        for task in (ended, listening):
            task.cancel()
        await asyncio.gather(ended, listening, return_exceptions=True)


async def _listen(supervisor: Supervisor, name: str, requests: Requests) -> None:
    """Until the caller is silent for too long, or has closed the call."""
    stopping: asyncio.Task[Any] | None = None
    with suppress(TimeoutError, StopAsyncIteration):
        while True:
            async with asyncio.timeout(LOST_S):
                request = await anext(requests)
            if request.WhichOneof("body") == "stop" and stopping is None:
                stopping = asyncio.create_task(supervisor.stop(name))


class _JobMemories:
    """The folders of jobs in host memory, as long as a process of the job runs here."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._users: Counter[Path] = Counter()

    @contextmanager
    def of_job(self, folder: Path, files: Any) -> Iterator[None]:
        """ValueError, OSError."""
        own = re.compile(rf"tidegate-{os.getuid()}-[0-9a-f]+")
        if folder.parent.resolve() != self._root or not own.fullmatch(folder.name):
            raise ValueError(
                f"the job's folder in host memory is {folder}, and this agent makes folders of user {os.getuid()} in "
                f"{self._root}: give it the same --host-memory-root as runtime.host_memory_root, and the same user"
            )
        for path in files:
            if folder / PurePosixPath(path).parent != credential_folder(folder, Party.JOB):
                raise ValueError(f"{path!r} is no file of a job's credential")
        self._users[folder] += 1
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for path, data in files.items():
                _write_private(folder / path, data)
            yield
        finally:
            self._users[folder] -= 1
            if not self._users[folder]:
                del self._users[folder]
                shutil.rmtree(folder, ignore_errors=True)


def _write_private(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)


def _config_of(start: machine_pb2.ProcessStart) -> JobConfig:
    """ValueError where the job's files, or its node, are not of this machine."""
    try:
        config = JobConfig.read(Path(start.config))
    except OSError as error:
        raise ValueError(
            f"the job's config cannot be read here ({error}): output_dir has to be on storage that all machines share"
        ) from error
    if start.node not in config.cluster.nodes:
        raise ValueError(f"{start.node!r} is no node of job {config.job}, which has {', '.join(config.cluster.nodes)}")
    if start.role and start.role not in set(Role):
        raise ValueError(f"{start.role!r} is no component: one of {', '.join(Role)}, or none for the fork server")
    logs = JobFolder.of(config).root
    if logs not in Path(start.log).parents or ".." in Path(start.log).parts:
        raise ValueError(f"the log {start.log} is not in the job's folder {logs}")
    try:
        interface_of(config.cluster.address_of(NodeId(start.node)))
    except NotThisMachine as error:
        raise ValueError(f"cluster.addresses: {start.node}: {error}") from error
    return config


def _spec_of(start: machine_pb2.ProcessStart, config: JobConfig) -> ServiceSpec:
    socket, device = fork_server_socket(config, NodeId(start.node)), config.cluster.device
    command: tuple[str, ...] = forkserver_command(socket)
    if start.role:
        words = ("--config", start.config, "--node", start.node, "--forkserver", str(socket))
        command = (f"services.{start.role}", *words)
    return ServiceSpec(
        name=f"{start.role or 'forkserver'}@{start.node}",
        command=(sys.executable, "-m", *command),
        log_path=Path(start.log),
        env=service_env(device) if start.role else fork_server_env(device),
        stop_timeout_s=_STOP_S,
    )


async def run(listen: str, tls: Credentials, host_memory_root: Path, log: Path) -> None:
    """Until SIGTERM. ValueError for an address on which it cannot listen."""
    stopping = await stop_signal()
    spawner = Spawner.begin(FORKED, env=service_env("cpu"), log_path=log)
    try:
        await spawner.ready()
        servicer = MachineServicer(spawner.start, host_memory_root)
        served = Service(
            machine_pb2.DESCRIPTOR.services_by_name["Machine"],
            lambda server: machine_pb2_grpc.add_MachineServicer_to_server(servicer, server),
        )
        server = await serve([served], listen, tls=tls)
        print(
            f"the agent {tls.identity.name} of cluster {tls.identity.cluster} listens on {server.endpoint}", flush=True
        )
        try:
            await stopping.wait()
        finally:
            await server.stop(grace_s=STOP_GRACE_S)
    finally:
        spawner.close()


def main(args: argparse.Namespace) -> int:
    """`tidegate agent`."""
    configure_logging("agent", level="INFO")
    try:
        tls = Credentials(args.credentials)
        if tls.identity.party is not Party.NODE:
            raise ConfigError(f"{args.credentials} is the credential of {tls.identity}: an agent's is of a node")
        asyncio.run(run(args.listen, tls, args.host_memory_root, args.log))
    except (CertsError, ConfigError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
