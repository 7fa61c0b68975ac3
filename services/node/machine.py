"""The agent of a machine that lends its nodes to jobs which are started elsewhere.

    tidegate agent --listen HOST:PORT --credentials FOLDER [--host-memory-root FOLDER]

It runs a fork server and three instances for each of a job's nodes here: a caller names a node and a role, and the
agent makes the command. A job's config names programs too (rewards, SGLang's Python), so who may call is as good as
this user. The job's config and logs are on storage that all machines share. Its folder in host memory, with the
credential of its processes, is this machine's: the first process of the job makes it, the last one removes it.

Invariants:
- A process lives as long as the call that started it. [test_machine: ends_with_its_call]
- Who calls and is silent for `LOST_S` is gone. [test_machine: a_silent_caller]
- A process of an instance starts when the one before it is gone. [test_machine: waits_for_the_one_before]
  [test_machine: cancelled_again_and_again]
- Nothing is written but the job's credential in host memory, and the log. [test_machine: nothing_is_written_outside]
  [test_machine: for_gates_makes_nothing]
- Nobody else reads the credential. [test_machine: of_another_user] [test_machine: has_the_credential_for_itself]
- A request that cannot run here is refused with the reason, and leaves nothing. [test_machine: what_cannot_run_here]
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import re
import secrets
import shutil
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import structlog

from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import job_folders
from tidegate.codec import encode_gate_state
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.gate import Gate, GateState
from tidegate.job import JobFolder
from tidegate.launcher.lock import LOCK, held_by
from tidegate.launcher.services import FORKED, fork_server_env, forkserver_command, service_env
from tidegate.logs import configure_logging
from tidegate.machines import BEAT_S, LOST_S, fork_server_socket
from tidegate.runtime.cuda import CudaDevice, NoCuda, cuda_devices
from tidegate.runtime.interfaces import NotThisMachine, interface_of
from tidegate.runtime.inventory import this_machine
from tidegate.runtime.processes import ServiceSpec, StartChild, Supervisor
from tidegate.runtime.service import STOP_GRACE_S, stop_signal
from tidegate.runtime.spawner import Spawner
from tidegate.types import NodeId, Role, job_id
from tidegate.v1 import machine_pb2, machine_pb2_grpc

_STOP_S = 10.0
MARK = "of-an-agent"
Requests = AsyncIterator[machine_pb2.RunProcessRequest]


class MachineServicer(machine_pb2_grpc.MachineServicer):
    def __init__(
        self, start_child: StartChild | None, host_memory_root: Path, devices: Sequence[CudaDevice] = ()
    ) -> None:
        """`devices`: those that jobs may use."""
        self._start_child = start_child
        self._devices = devices
        self._memories = _JobMemories(host_memory_root)
        self._running: set[tuple[Path, str]] = set()
        """By the job's folder in host memory, and name."""
        self._ending: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()
        self._log = structlog.get_logger("agent")

    async def GetMachine(self, request: machine_pb2.GetMachineRequest, context: Any) -> machine_pb2.GetMachineResponse:
        has_shared = bool(request.shared) and await asyncio.to_thread(_is_seen, Path(request.shared))
        missing = await asyncio.to_thread(lambda: [path for path in request.paths if not os.path.exists(path)])
        found = this_machine(self._memories.root, self._devices)
        found.has_shared = has_shared
        found.missing_paths.extend(missing)
        return found

    async def GetClock(self, request: machine_pb2.GetClockRequest, context: Any) -> machine_pb2.GetClockResponse:
        return machine_pb2.GetClockResponse(monotonic_ns=time.monotonic_ns())

    async def GetGates(self, request: machine_pb2.GetGatesRequest, context: Any) -> machine_pb2.GetGatesResponse:
        root, nodes = Path(request.root), [job_id(node) for node in request.nodes]
        found = await asyncio.to_thread(lambda: [state for node in nodes for state in _gate_states(root, node)])
        return machine_pb2.GetGatesResponse(gates=map(encode_gate_state, found))

    async def RunProcess(self, requests: Requests, context: Any) -> AsyncIterator[machine_pb2.RunProcessResponse]:
        start = await _first(requests)
        config = await _config_of(start)
        spec, memory = _spec_of(start, config), Path(config.runtime.host_memory_root)
        place, files = (memory, spec.name), dict(start.files)
        self._memories.check(memory, files)
        while place in self._running or not self._memories.have_room(memory, files):
            # What ran before, for a caller that is gone, is still ending.
            yield machine_pb2.RunProcessResponse(beat=machine_pb2.Beat())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), BEAT_S)
        self._running.add(place)
        ran = AsyncExitStack()
        ran.callback(self._free, place)
        try:
            await ran.enter_async_context(self._memories.of_job(memory, files))
            supervisor = Supervisor(self._start_child)
            pid = supervisor.start(spec)
            ran.callback(self._log.info, "process gone", job=config.job, name=spec.name)
            ran.push_async_callback(supervisor.aclose)
            self._log.info("process started", job=config.job, name=spec.name, pid=pid)
            yield machine_pb2.RunProcessResponse(started=machine_pb2.ProcessStarted(pid=pid))
            async for response in _until_ended(supervisor, spec.name, requests):
                yield response
        finally:
            # In a task of its own: gRPC may cancel a call again while its process ends.
            ending = asyncio.create_task(ran.aclose())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    def _free(self, place: tuple[Path, str]) -> None:
        self._running.discard(place)
        self._gone.set()
        self._gone = asyncio.Event()

    async def aclose(self) -> None:
        """Until the processes of all calls that ended are gone."""
        while self._ending:
            await asyncio.wait(self._ending)


async def _first(requests: Requests) -> machine_pb2.ProcessStart:
    try:
        async with asyncio.timeout(LOST_S):
            request = await anext(aiter(requests))
    except (TimeoutError, StopAsyncIteration) as error:
        raise ValueError("the call has no request that starts a process") from error
    return request.start


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
    """The folders of jobs in host memory, as long as a process of the job runs here.

    A folder that an agent made has `MARK`: the next one, after a death, removes it. One without it is a launcher's, and
    is removed where no launcher has its lock any more.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._users: Counter[Path] = Counter()
        self._files: dict[Path, Mapping[str, bytes]] = {}

    def check(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """ValueError for a folder that is not of this agent, or a file that is no credential."""
        own = re.compile(rf"tidegate-{os.getuid()}-[0-9a-f]+")
        if folder.parent.resolve() != self.root or not own.fullmatch(folder.name):
            raise ValueError(
                f"the job's folder in host memory is {folder}, and this agent makes folders of user {os.getuid()} in "
                f"{self.root}: give it the same --host-memory-root as runtime.host_memory_root, and the same user"
            )
        for path in files:
            if folder / PurePosixPath(path).parent not in job_folders(folder):
                raise ValueError(f"{path!r} is no file of a job's credential")

    def have_room(self, folder: Path, files: Mapping[str, bytes]) -> bool:
        """Whether no process of an earlier start of the job is left, which has another credential."""
        return not self._users[folder] or self._files[folder] == files

    @asynccontextmanager
    async def of_job(self, folder: Path, files: Mapping[str, bytes]) -> AsyncIterator[None]:
        """ValueError, OSError."""
        if not self._users[folder]:
            _make_anew(folder, files)
            self._files[folder] = files
        self._users[folder] += 1
        try:
            yield
        finally:
            self._users[folder] -= 1
            if not self._users[folder]:
                del self._users[folder], self._files[folder]
                if (folder / MARK).is_file():  # else a launcher on this machine has it now
                    _remove(folder)


def _remove(folder: Path) -> None:
    """At once gone for the next one, and then from memory: that may take seconds."""
    aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    with suppress(OSError):
        folder.rename(aside)
        threading.Thread(target=shutil.rmtree, args=(aside,), kwargs={"ignore_errors": True}).start()


def _make_anew(folder: Path, files: Mapping[str, bytes]) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ValueError(f"{folder} is another user's: remove it, or take another host memory") from None
        if not (folder / MARK).is_file() and held_by(folder / LOCK) is not None:
            raise ValueError(
                f"{folder} is of a job that this machine started: leave the machine out of cluster.machines"
            ) from None
        _remove(folder)
        folder.mkdir(mode=0o700)
    _write_private(folder / MARK, b"")
    for path, data in files.items():
        _write_private(folder / path, data)


def _write_private(path: Path, data: bytes) -> None:
    """A new file: nobody else has made it, and it is no link."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def _is_seen(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # of another user
        return False


def _gate_states(root: Path, node: str) -> list[GateState]:
    """What a node's gate says, if it was ever passed. Makes nothing. ValueError where there is no folder for gates."""
    if not (root.is_absolute() and root.is_dir()):
        raise ValueError(f"there is no folder {root} for gates: make it, on a local disk of this machine")
    return Gate(root / node).report() if (root / node).is_dir() else []


async def _config_of(start: machine_pb2.ProcessStart) -> JobConfig:
    """ValueError where the job's files, or its node, are not of this machine."""
    path = Path(start.config)
    shared = "output_dir has to be on storage that all machines share"
    try:
        async with asyncio.timeout(LOST_S):
            config = await asyncio.to_thread(_read, path)
    except TimeoutError:
        raise ValueError(f"the job's config {path} is not read within {LOST_S:g} s: {shared}") from None
    except OSError as error:
        raise ValueError(f"the job's config cannot be read here ({error}): {shared}") from error
    job = JobFolder.of(config)
    if path != job.config:
        raise ValueError(f"{path} is not the config of job {config.job}, which is {job.config}")
    if start.node not in config.cluster.nodes:
        raise ValueError(f"{start.node!r} is no node of job {config.job}, which has {', '.join(config.cluster.nodes)}")
    if start.role and start.role not in set(Role):
        raise ValueError(f"{start.role!r} is no component: one of {', '.join(Role)}, or none for the fork server")
    if job.root not in Path(start.log).parents or ".." in Path(start.log).parts:
        raise ValueError(f"the log {start.log} is not in the job's folder {job.root}")
    try:
        interface_of(config.cluster.address_of(NodeId(start.node)))
    except NotThisMachine as error:
        raise ValueError(f"cluster.addresses: {start.node}: {error}") from error
    return config


def _read(path: Path) -> JobConfig:
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return JobConfig.read(path)


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


async def run(
    listen: str, tls: Credentials, host_memory_root: Path, log: Path, devices: Sequence[CudaDevice] = ()
) -> None:
    """Until SIGTERM. ValueError for an address on which it cannot listen."""
    stopping = await stop_signal()
    spawner = Spawner.begin(FORKED, env=service_env("cuda" if devices else "cpu"), log_path=log)
    try:
        await spawner.ready()
        servicer = MachineServicer(spawner.start, host_memory_root, devices)
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
            await servicer.aclose()
    finally:
        spawner.close()


def main(args: argparse.Namespace) -> int:
    """`tidegate agent`."""
    configure_logging("agent", level="INFO")
    try:
        tls = Credentials(args.credentials)
        this_machine(args.host_memory_root)
        if tls.identity.party is not Party.NODE:
            raise ConfigError(f"{args.credentials} is the credential of {tls.identity}: an agent's is of a node")
        devices = cuda_devices() if args.device == "cuda" else []
        asyncio.run(run(args.listen, tls, args.host_memory_root, args.log, devices))
    except NoCuda as none:
        print(f"tidegate: --device cuda, but on this machine {none}", file=sys.stderr)
        return 1
    except (CertsError, ConfigError, ValueError, OSError) as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return 1
    return 0
