"""The agent of a machine: `python -m services.node --output-dir FOLDER --slots JSON ...`.

It keeps a whole cluster on this machine: NATS and Redis, the gates, a fork server, the cluster's scheduler, and the
launchers of the jobs that the scheduler asks for. All of them are its children and die with it. The queue is in the
stores, so the next agent in the same folder goes on with it: jobs that ran go on from their checkpoints.

Other machines may lend nodes to the cluster: their agents (`services.node.machine`) tell the gates, and run the
processes of a job there. For these NATS and Redis have a front on this machine's address.

Several machines may keep the cluster, one at a time: with `--keeper` the agent first waits for its turn
(`services.node.keeping`). It begins with new servers, which get the queue from its files.

Order of a start: lock, turn, credentials, servers, fronts, gRPC, fork server, description, scheduler.
Order of a stop (SIGTERM): scheduler, jobs, fork server, gRPC, servers, turn.

A server that dies is started again, on its port and its data.

Invariants:
- One agent at a time has a cluster's folder. [test_agent: a_second_agent]
- One that can decide nothing gives its turn away. [test_agent: that_decides_nothing]
- However it ends, no process and no host memory of it remains. [test_cluster: and_leave_nothing]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.node.far_machines import FarMachines
from services.node.jobs import LAUNCHER, NodeJobs, StillRuns
from services.node.keeping import LOOK_S, Beats, OtherCluster, claimed
from services.node.servicer import NodeServicer, Version
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.identity import Party
from tidegate.cluster.credentials import ClusterCredentials
from tidegate.cluster.folder import ClusterDescription, ClusterFolder
from tidegate.cluster.keepers import KEEPS, Keepers, Term, TermTaken
from tidegate.cluster.machines import Machines
from tidegate.cluster.slots import Slots
from tidegate.config.job_config import JobConfig
from tidegate.gate import Gate
from tidegate.launcher.claim import write_private
from tidegate.launcher.lock import RECORD_BYTES, held, machine_number
from tidegate.launcher.services import FORKED, fork_server_env, forkserver_command, service_env
from tidegate.logs import configure_logging
from tidegate.runtime.cuda import NoCuda, cuda_devices
from tidegate.runtime.embedded import EmbeddedServers, FolderInUse, ServerFailed
from tidegate.runtime.front import MOST_CONNECTIONS, Front
from tidegate.runtime.processes import ServiceSpec, Supervisor
from tidegate.runtime.server_kinds import ServerGuard, ServerPackageMissing
from tidegate.runtime.service import STOP_GRACE_S, stop_signal
from tidegate.runtime.spawner import Spawner
from tidegate.types import LOOPBACK, JobId, job_id
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc

SOURCE = "agent"
SCHEDULER, FORK_SERVER = "scheduler", "forkserver"
GIVE_WAY_S = 3 * LOOK_S
"""A unit starts what has failed again at once. Others look for their turn first."""
UNDECIDED_S = 60.0
"""As long as a job waits for NATS and Redis."""
_MAX_RESTARTS = 1000
"""An agent stays for months: its scheduler is started again as often as it dies, later each time in a row."""


class AgentRuns(RuntimeError):
    """Another agent has the folder."""


class Agent:
    """The parts of a cluster on one machine, between `run`'s start and its end."""

    def __init__(
        self,
        folder: ClusterFolder,
        slots: Slots,
        machines: Machines,
        *,
        memory: Path,
        shared: Path,
        node_credentials: str = "",
        command_port: int = 0,
        name: str = "",
    ) -> None:
        """`shared`: a file that all machines have to see. `node_credentials`: for commands of other machines, which are
        answered at `command_port`. `name`: of this machine, where others may keep the cluster too."""
        self._name = name
        self._node_credentials = node_credentials
        self._command_port = command_port
        self._folder = folder
        self._shared = shared
        self._slots = slots
        self._machines = machines
        self._memory = memory
        self._gate_root = Path(machines.gate_root or folder.gates)
        self._credentials = ClusterCredentials.issue(memory / "credentials", address=machines.address)
        self._far_urls: dict[str, str] = {}
        """The keys of NATS and Redis in a job's config, with their URLs as other machines reach them."""
        self._jobs_in: dict[JobId, tuple[Path, Path]] = {}
        """The credentials of the jobs that the servers let in."""
        self._servers = EmbeddedServers(folder.servers, guard=self._guard())
        self._spawner = Spawner.begin(
            (LAUNCHER, *FORKED), env=service_env(slots.device), log_path=folder.logs / "spawner.out"
        )
        self._supervisor = Supervisor(self._spawner.start)
        self._log = structlog.get_logger(SOURCE)

    async def run(self) -> None:
        """Until SIGTERM. ServerFailed, FolderInUse, ServerPackageMissing."""
        stopping = await stop_signal()
        folder, tls = self._folder, Credentials(self._credentials.of(Party.NODE))
        version = Version(time.time_ns())
        far_nodes = {node for each in self._machines.far for node in each.nodes}
        gates = {node: Gate(self._gate_root / node) for node in self._slots.nodes if node not in far_nodes}
        machines = FarMachines(
            self._machines,
            self._slots,
            shared=self._shared,
            host_memory_root=self._memory.parent,
            changed=version.changed,
        )
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(machines.aclose)
            await closing.enter_async_context(self._servers)
            if far_nodes:
                await self._open_fronts(closing)
            servicer = NodeServicer(
                self._slots, gates, machines, version, host_memory_root=self._memory.parent, name=self._name
            )
            descriptor = cluster_pb2.DESCRIPTOR.services_by_name["Node"]
            served = Service(
                descriptor,
                lambda server: cluster_pb2_grpc.add_NodeServicer_to_server(servicer, server),
                {StillRuns: grpc.StatusCode.FAILED_PRECONDITION},
            )
            jobs = NodeJobs(folder, self._supervisor, prepare=self._prepared, leave=self._left, changed=version.changed)
            servicer.jobs = jobs
            if self._slots.device == "cuda":
                # torch is imported for it: nobody waits, at the end neither.
                threading.Thread(target=_find_devices, args=(servicer,), daemon=True).start()
            server = await serve([served], f"{LOOPBACK}:0", tls=tls)
            closing.push_async_callback(lambda: server.stop(grace_s=STOP_GRACE_S))
            closing.callback(self._spawner.close)
            closing.push_async_callback(self._supervisor.aclose)
            closing.push_async_callback(jobs.aclose)
            fork_server = self._spec(FORK_SERVER, forkserver_command(self._fork_server))
            self._supervisor.start(replace(fork_server, env=fork_server_env(self._slots.device)))
            self._describe(server.endpoint)
            closing.callback(folder.description.unlink, missing_ok=True)
            closing.callback(folder.endpoint.unlink, missing_ok=True)
            self._supervisor.start(self._spec(SCHEDULER, ("services.scheduler.cluster", "--folder", str(folder.root))))
            closing.push_async_callback(lambda: self._supervisor.stop(SCHEDULER))
            self._log.info("serving", endpoint=server.endpoint, pid=os.getpid(), nodes=dict(self._slots.nodes))
            works = [self._watch_servers(), self._watch_ends(jobs)]
            if self._name:
                works.append(_watch_decisions(servicer))
            if far_nodes:
                works.append(machines.watch())
            watching = [asyncio.create_task(each) for each in works]
            stop = asyncio.create_task(stopping.wait())
            try:
                done, _ = await asyncio.wait({stop, *watching}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    task.result()
            finally:
                self._log.info("stopping")
                for task in (stop, *watching):
                    task.cancel()
                await asyncio.gather(stop, *watching, return_exceptions=True)

    async def _open_fronts(self, closing: contextlib.AsyncExitStack) -> None:
        """Where other machines reach the servers. NATS asks for certificates itself, valkey cannot."""
        address, own = self._machines.address, self._credentials.of(Party.NODE)
        nats = await Front.open(address, to_port=self._servers.nats.port, credential=None)
        closing.push_async_callback(nats.aclose)
        store = await Front.open(address, to_port=self._servers.store.port, credential=own)
        closing.push_async_callback(store.aclose)
        self._far_urls = {"nats_url": f"tls://{address}:{nats.port}", "redis_url": f"rediss://{address}:{store.port}"}

    @property
    def _fork_server(self) -> Path:
        return self._memory / "forkserver.sock"

    def _spec(self, name: str, command: tuple[str, ...]) -> ServiceSpec:
        return ServiceSpec(
            name=name,
            command=(sys.executable, "-m", *command),
            log_path=self._folder.logs / f"{name}.out",
            env=service_env(self._slots.device),
            max_restarts=_MAX_RESTARTS,
            stays=True,
        )

    def _describe(self, endpoint: str) -> None:
        description = ClusterDescription(
            slots=self._slots,
            nats_url=self._servers.nats.url,
            redis_url=self._servers.store.url,
            agent=endpoint,
            credentials=str(self._credentials.root),
            address=self._machines.address,
            node_credentials=self._node_credentials,
            command_port=self._command_port,
        )
        write_private(self._folder.description, description.to_json())

    def _guard(self) -> ServerGuard:
        users = [self._credentials.of(Party.SCHEDULER), *(folder for pair in self._jobs_in.values() for folder in pair)]
        return ServerGuard.of(self._credentials.of(Party.NODE), *users)

    async def _prepared(self, config: JobConfig) -> JobConfig:
        await self._spawner.ready()
        job = job_id(config.job)
        self._jobs_in[job] = self._credentials.issue_to_job(job)
        await self._servers.let_in(self._guard())
        own = str(self._credentials.of_job(job))
        servers: dict[str, Any] = {
            "nats_url": self._servers.nats.url,
            "redis_url": self._servers.store.url,
            "nats_credentials": own,
            "redis_credentials": own,
        }
        section = self._machines.section_of(config.cluster)
        if section.machines:
            servers |= self._far_urls | {"credentials_travel": True}
        runtime = {
            "gate_root": str(self._gate_root),
            "fork_server": str(self._fork_server),
            "adopts_store": False,
        }
        return config.model_copy(
            update={
                "cluster": section,
                "servers": config.servers.model_copy(update=servers),
                "runtime": config.runtime.model_copy(update=runtime),
            }
        )

    async def _left(self, job: JobId) -> None:
        if self._jobs_in.pop(job, None) is None:
            return
        await self._servers.let_in(self._guard())
        shutil.rmtree(self._credentials.of_job(job), ignore_errors=True)

    async def _watch_servers(self) -> None:
        while True:
            dead = await self._servers.first_exit()
            self._log.warning("server died, started again", server=dead.name, log=str(dead.log_path))
            await self._servers.start()

    async def _watch_ends(self, jobs: NodeJobs) -> None:
        while True:
            ended = await self._supervisor.next_end()
            if ended.name in (SCHEDULER, FORK_SERVER):
                self._log.warning("process ended", name=ended.name, status=ended.exit_status)
                if ended.restarts_in_s is None and not ended.was_asked:
                    raise ServerFailed(f"{ended.name} ended with status {ended.exit_status} and stays away")
            await jobs.note_end(ended)


async def _watch_decisions(servicer: NodeServicer) -> None:
    """ServerFailed where the cluster decides nothing for long, as with a full disk: another machine may do better."""
    try:
        while True:
            servicer.decided.clear()
            await asyncio.wait_for(servicer.decided.wait(), UNDECIDED_S)
    except TimeoutError:
        why = f"the cluster has decided nothing for {UNDECIDED_S:g} s: see cluster.jsonl and scheduler.out"
        raise ServerFailed(why) from None


def _find_devices(servicer: NodeServicer) -> None:
    """A machine that keeps a cluster of other machines' GPUs may have none."""
    with contextlib.suppress(NoCuda):
        servicer.devices = cuda_devices()


def _raise_limit_of_files() -> None:
    """A front has two descriptors for each connection from another machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MOST_CONNECTIONS
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted), hard)
        )


@contextlib.contextmanager
def locked(folder: ClusterFolder) -> Iterator[Callable[[], None]]:
    """AgentRuns. Call what it gives once this agent keeps the cluster, and not only waits for that."""
    folder.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_up = AgentRuns(f"a cluster is up in {folder.root.parent}: end it with tidegate down")

    def note(*, keeps: bool) -> None:
        record = {"pid": os.getpid(), "machine": machine_number(), KEEPS: int(keeps)}
        os.pwrite(fd, json.dumps(record).encode().ljust(RECORD_BYTES), 0)

    with held(folder.lock, lambda _: is_up) as fd:
        note(keeps=False)
        yield lambda: note(keeps=True)


@contextlib.contextmanager
def in_turn(folder: ClusterFolder, name: str, address: str, cluster: str) -> Iterator[Path | None]:
    """Once it is this machine's turn to keep the cluster, the file that tells so. None: it was asked to end first."""
    keepers = Keepers(folder.keepers)
    term = asyncio.run(_claimed(keepers, name, address, cluster))
    if term is None:
        yield None
        return
    # Until the agent has a handler of its own: the term ends in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    beats = Beats(keepers, term)
    has_failed = False
    try:
        _remove(folder.servers)
        yield keepers.path(term.number)
    except ServerFailed:
        has_failed = True
        raise
    finally:
        beats.end()
        if has_failed:
            time.sleep(GIVE_WAY_S)


async def _claimed(keepers: Keepers, name: str, address: str, cluster: str) -> Term | None:
    def says(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    return await claimed(keepers, await stop_signal(), name=name, address=address, cluster=cluster, says=says)


def _remove(servers: Path) -> None:
    """OSError where something of an earlier term would be used."""
    aside = servers.with_name(f"{servers.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        servers.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _turn(folder: ClusterFolder, args: argparse.Namespace, machines: Machines) -> AbstractContextManager[Path | None]:
    if args.keeper is None:
        return contextlib.nullcontext(folder.lock)
    return in_turn(folder, args.keeper, machines.address, args.cluster)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.node", description="The agent of a machine.")
    parser.add_argument("--output-dir", type=Path, required=True, help="the folder of the jobs' folders")
    parser.add_argument("--slots", required=True, help="tidegate.cluster.slots as JSON")
    parser.add_argument("--machines", required=True, help="tidegate.cluster.machines as JSON")
    parser.add_argument("--host-memory-root", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--node-credentials", default="", help="of this machine, for commands of other machines")
    parser.add_argument("--command-port", type=int, default=0, help="where those are answered; 0: any")
    parser.add_argument("--keeper", metavar="NAME", help="this machine's name, where several may keep the cluster")
    parser.add_argument("--cluster", default="", help="a digest of its nodes and machines, to compare with a keeper's")
    args = parser.parse_args()
    folder = ClusterFolder.of(args.output_dir)
    slots, machines = Slots.of(json.loads(args.slots)), Machines.of(json.loads(args.machines))
    memory = folder.host_memory(args.host_memory_root)
    _raise_limit_of_files()
    try:
        with locked(folder) as keeps, _turn(folder, args, machines) as shared:
            if shared is None:
                return 0
            keeps()
            configure_logging(SOURCE, path=folder.logs / f"{SOURCE}.jsonl")
            shutil.rmtree(memory, ignore_errors=True)
            memory.mkdir(mode=0o700)
            try:
                agent = Agent(
                    folder,
                    slots,
                    machines,
                    memory=memory,
                    shared=shared,
                    node_credentials=args.node_credentials,
                    command_port=args.command_port,
                    name=args.keeper or "",
                )
                asyncio.run(agent.run())
            finally:
                shutil.rmtree(memory, ignore_errors=True)
    except (AgentRuns, OtherCluster, TermTaken, ServerFailed, FolderInUse, ServerPackageMissing, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
