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

Asked by SIGUSR2 (`tidegate reload`), the agent takes its program anew, which may be of another release, and keeps the
servers, the launchers of jobs, and what these fork from (`tidegate.runtime.handover`). The scheduler starts anew. What
an agent of another form has left is refused, and then everything starts anew.

Invariants:
- One agent at a time has a cluster's folder. [test_agent: a_second_agent]
- One that can decide nothing gives its turn away. [test_agent: that_decides_nothing]
- However it ends, no process and no host memory of it remains. [test_cluster: and_leave_nothing]
- No job notices that it takes its program anew. [test_reload: no_job_notices]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.node.agent_lock import AgentLock, AgentRuns, Turn, locked, whose_turn
from services.node.far_machines import FarMachines
from services.node.handed import ClusterLeft, Left
from services.node.jobs import LAUNCHER, NodeJobs, StillRuns
from services.node.keeping import OtherCluster
from services.node.servicer import NodeServicer, Version
from tidegate.adapters.grpc_server import RpcServer, Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.identity import Party
from tidegate.cluster.credentials import ClusterCredentials
from tidegate.cluster.folder import ClusterDescription, ClusterFolder
from tidegate.cluster.keepers import TermTaken
from tidegate.cluster.machines import Machines
from tidegate.cluster.slots import Slots
from tidegate.config.job_config import JobConfig
from tidegate.gate import Gate
from tidegate.launcher.claim import CannotStart, write_private
from tidegate.launcher.left_memory import Removals, left_by_launchers
from tidegate.launcher.services import FORKED, fork_server_env, forkserver_command, service_env
from tidegate.logs import configure_logging
from tidegate.machines import release
from tidegate.runtime import handover
from tidegate.runtime.cuda import NoCuda, cuda_devices
from tidegate.runtime.embedded import EmbeddedServers, FolderInUse, ServerFailed
from tidegate.runtime.front import MOST_CONNECTIONS, Front
from tidegate.runtime.handover import NoHandover
from tidegate.runtime.next_program import NextProgram
from tidegate.runtime.processes import ServiceEnd, ServiceSpec, Supervisor, reap_orphans
from tidegate.runtime.server_kinds import ServerGuard, ServerPackageMissing
from tidegate.runtime.service import STOP_GRACE_S, stop_signal
from tidegate.runtime.spawner import Spawner
from tidegate.types import LOOPBACK, JobId, job_id
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc

SOURCE = "agent"
SCHEDULER, FORK_SERVER = "scheduler", "forkserver"
UNDECIDED_S = 60.0
"""As long as a job waits for NATS and Redis."""
_FAULTS = (AgentRuns, OtherCluster, TermTaken, NoHandover, ServerFailed, FolderInUse, ServerPackageMissing, OSError)
"""They end an agent, and say why."""
_MAX_RESTARTS = 1000
"""An agent stays for months: its scheduler is started again as often as it dies, later each time in a row."""


class Agent:
    """The parts of a cluster on one machine, between `run`'s start and its end."""

    def __init__(
        self,
        folder: ClusterFolder,
        slots: Slots,
        machines: Machines,
        *,
        memory: Path,
        node_credentials: str = "",
        command_port: int = 0,
        name: str = "",
        lock: AgentLock,
        turn: Turn,
    ) -> None:
        """`node_credentials`: for commands of other machines, which are answered at `command_port`. `name`: of this
        machine, where others may keep the cluster too. `lock` has what the program before has left."""
        self._lock = lock
        self._turn = turn
        before = lock.left.cluster if lock.left else None
        self._before = before
        self._name = name
        self._node_credentials = node_credentials
        self._command_port = command_port
        self._folder = folder
        self._slots = slots
        self._machines = machines
        self._memory = memory
        self._gate_root = Path(machines.gate_root or folder.gates)
        if before is None:
            self._credentials = ClusterCredentials.issue(memory / "credentials", address=machines.address)
        else:
            self._credentials = ClusterCredentials(memory / "credentials")
        self._far_urls: dict[str, str] = {}
        """The keys of NATS and Redis in a job's config, with their URLs as other machines reach them."""
        self._fork_servers: dict[JobId, str] = dict(before.fork_servers if before else {})
        """By job that the servers let in: the service that forks its workers."""
        self._fronts: list[Front] = []
        self._renewal = asyncio.Event()
        self._log = structlog.get_logger(SOURCE)

    async def run(self) -> None:
        """Until SIGTERM. ServerFailed, FolderInUse, ServerPackageMissing."""
        stopping = self._stopping = await stop_signal()
        asyncio.get_running_loop().add_signal_handler(handover.SIGNAL, self._renewal.set)
        handover.ready()  # before there are children, who would get this process's mask
        self._spawner = Spawner.begin(
            (LAUNCHER, *FORKED), env=service_env(self._slots.device), log_path=self._folder.logs / "spawner.out"
        )
        before = self._before
        self._supervisor = Supervisor(self._spawner.start, untold=before.ends if before else ())
        for service in before.services if before else ():
            self._supervisor.watch(service)
        self._turn.has_begun = True
        try:
            await self._run(stopping)
        finally:
            # Where it has failed before it could do so in order.
            await self._supervisor.aclose()
            self._spawner.close()

    async def _run(self, stopping: asyncio.Event) -> None:
        before = self._before
        self._servers = EmbeddedServers(
            self._folder.servers, guard=self._guard(), running=before.servers if before else None
        )
        folder, tls = self._folder, Credentials(self._credentials.of(Party.NODE))
        version = Version(time.time_ns())
        far_nodes = {node for each in self._machines.far for node in each.nodes}
        gates = {node: Gate(self._gate_root / node) for node in self._slots.nodes if node not in far_nodes}
        machines = FarMachines(
            self._machines,
            self._slots,
            shared=self._turn.shared,
            host_memory_root=self._memory.parent,
            changed=version.changed,
        )
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(machines.aclose)
            await closing.enter_async_context(self._servers)
            if before is not None:
                try:
                    await self._servers.let_in(self._guard(), anew=True)
                except OSError as error:
                    self._log.warning("the servers keep the rights of the release before", error=str(error))
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
            jobs = NodeJobs(
                folder,
                self._supervisor,
                prepare=self._prepared,
                leave=self._left,
                changed=version.changed,
                starts=before.starts if before else None,
            )
            servicer.jobs = jobs
            self._servicer = servicer
            if before is not None and before.devices:
                servicer.devices = before.devices  # jobs use them: the question takes memory on each
            elif self._slots.device == "cuda":
                # torch is imported for it: nobody waits, at the end neither.
                threading.Thread(target=_find_devices, args=(servicer,), daemon=True).start()
            server = await serve([served], f"{LOOPBACK}:0", tls=tls)
            closing.push_async_callback(lambda: server.stop(grace_s=STOP_GRACE_S))
            closing.push_async_callback(self._supervisor.aclose)
            closing.push_async_callback(jobs.aclose)
            fork_server = self._spec(self._fork_server, forkserver_command(self._socket_of(self._fork_server)))
            log = folder.logs / f"{FORK_SERVER}.out"
            self._supervisor.start(replace(fork_server, env=fork_server_env(self._slots.device), log_path=log))
            self._describe(server.endpoint)
            closing.callback(folder.description.unlink, missing_ok=True)
            closing.callback(folder.endpoint.unlink, missing_ok=True)
            self._supervisor.start(self._spec(SCHEDULER, ("services.scheduler.cluster", "--folder", str(folder.root))))
            closing.push_async_callback(lambda: self._supervisor.stop(SCHEDULER))
            self._log.info("serving", endpoint=server.endpoint, pid=os.getpid(), nodes=dict(self._slots.nodes))
            works = [self._watch_servers(), self._watch_ends(jobs, server)]
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
        fds: tuple[int | None, ...] = (self._before.listeners if self._before else ()) or (None, None)
        nats = await Front.open(address, to_port=self._servers.nats.port, credential=None, listener=fds[0])
        closing.push_async_callback(nats.aclose)
        store = await Front.open(address, to_port=self._servers.store.port, credential=own, listener=fds[1])
        closing.push_async_callback(store.aclose)
        self._fronts = [nats, store]
        self._far_urls = {"nats_url": f"tls://{address}:{nats.port}", "redis_url": f"rediss://{address}:{store.port}"}

    @property
    def _fork_server(self) -> str:
        """The service that forks the workers of jobs which start under this program."""
        return f"{FORK_SERVER}-{self._lock.number}" if self._lock.number else FORK_SERVER

    def _socket_of(self, fork_server: str) -> Path:
        return self._memory / f"{fork_server}.sock"

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
            program=self._lock.next_program.program,
            handover_form=handover.FORM,
            release=release(),
            python=sys.executable,
        )
        write_private(self._folder.description, description.to_json())

    def _guard(self) -> ServerGuard:
        jobs = [folder for job in self._fork_servers for folder in self._credentials.pair_of_job(job)]
        users = [self._credentials.of(Party.SCHEDULER), *jobs]
        return ServerGuard.of(self._credentials.of(Party.NODE), *users)

    async def _prepared(self, config: JobConfig) -> JobConfig:
        """CannotStart, OSError: not now."""
        await self._spawner.ready()
        job = job_id(config.job)
        self._fork_servers[job] = self._fork_server
        try:
            self._credentials.issue_to_job(job)
        except OSError as error:
            folder = self._credentials.of_job(job)
            raise CannotStart(f"its credentials cannot be written to {folder} ({error}): make room there") from error
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
            "fork_server": str(self._socket_of(self._fork_server)),
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
        if self._fork_servers.pop(job, None) is None:
            return
        try:
            await self._servers.let_in(self._guard())
        except OSError as error:  # the next one that comes or goes puts it out
            self._log.warning("the servers let in a job that has ended", job=job, error=str(error))
        shutil.rmtree(self._credentials.of_job(job), ignore_errors=True)
        await self._end_idle_fork_servers()

    async def _end_idle_fork_servers(self) -> None:
        """Those of earlier programs, where no job is left that forks from them."""
        there = [each.spec.name for each in self._supervisor.watched() if each.spec.name.startswith(FORK_SERVER)]
        idle = [name for name in there if name != self._fork_server and name not in self._fork_servers.values()]
        await self._supervisor.stop(*idle)

    async def _watch_servers(self) -> None:
        while True:
            dead = await self._servers.first_exit()
            self._log.warning("server died, started again", server=dead.name, log=str(dead.log_path))
            await self._servers.start()

    async def _watch_ends(self, jobs: NodeJobs, server: RpcServer) -> None:
        """Between two ends it may take its program anew: then each end is noted, or left to be."""
        await self._end_idle_fork_servers()
        while True:
            ending = asyncio.create_task(self._supervisor.next_end())
            asked = asyncio.create_task(self._renewal.wait())
            try:
                await asyncio.wait({ending, asked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (ending, asked):
                    task.cancel()  # what it has not taken stays to be told
                await asyncio.gather(ending, asked, return_exceptions=True)
            if not ending.cancelled():
                await self._note_end(jobs, ending.result())
            elif self._renewal.is_set():
                self._renewal.clear()
                await self._take_program(jobs, server)

    async def _note_end(self, jobs: NodeJobs, ended: ServiceEnd) -> None:
        if ended.name == SCHEDULER or ended.name.startswith(FORK_SERVER):
            tells = self._log.info if ended.was_asked else self._log.warning
            tells("process ended", name=ended.name, status=ended.exit_status)
            if ended.restarts_in_s is None and not ended.was_asked:
                raise ServerFailed(f"{ended.name} ended with status {ended.exit_status} and stays away")
        await jobs.note_end(ended)
        reap_orphans(self._supervisor.pids | self._servers.pids | {self._spawner.pid})

    async def _take_program(self, jobs: NodeJobs, server: RpcServer) -> None:
        """It returns only where it cannot, or is to end."""
        if fault := await self._lock.next_program.fault():
            self._log.error("its program is not taken anew", reason=fault)
            return
        self._log.info("takes its program anew", words=list(self._lock.next_program.words))
        await self._supervisor.stop(SCHEDULER)
        async with jobs.unchanging():
            await server.stop(grace_s=STOP_GRACE_S)
            if not await handover.is_last_call(self._stopping):
                return
            self._spawner.close()
            cluster = ClusterLeft(
                self._turn.term(),
                self._servers.running,
                tuple(front.listener for front in self._fronts),
                tuple(self._supervisor.watched()),
                tuple(self._supervisor.untold_ends()),
                jobs.starts,
                self._fork_servers,
                tuple(self._servicer.devices),
            )
            self._lock.leave(cluster)


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
    help_ = "tidegate.runtime.next_program as JSON"
    parser.add_argument("--next-program", type=NextProgram.of, required=True, help=help_)
    handover.hold()
    args = parser.parse_args()
    folder = ClusterFolder.of(args.output_dir)
    slots, machines = Slots.of(json.loads(args.slots)), Machines.of(json.loads(args.machines))
    memory = folder.host_memory(args.host_memory_root)
    _raise_limit_of_files()
    try:
        left = handover.handed_over(Left.of)
        with contextlib.ExitStack() as has:
            lock = has.enter_context(locked(folder, left, args.next_program))
            removals = Removals()
            removals.go_on(args.host_memory_root)
            for memory_left in left_by_launchers(args.host_memory_root):  # killed with an agent before this one
                removals.begin(memory_left)
            turn = has.enter_context(whose_turn(folder, lock, args.keeper, machines.address, args.cluster))
            if turn is None:
                return 0
            lock.note(keeps=True)
            configure_logging(SOURCE, path=folder.logs / f"{SOURCE}.jsonl")
            if left is None or left.cluster is None:
                shutil.rmtree(memory, ignore_errors=True)
                memory.mkdir(mode=0o700)
            try:
                agent = Agent(
                    folder,
                    slots,
                    machines,
                    memory=memory,
                    node_credentials=args.node_credentials,
                    command_port=args.command_port,
                    name=args.keeper or "",
                    lock=lock,
                    turn=turn,
                )
                asyncio.run(agent.run())
            finally:
                shutil.rmtree(memory, ignore_errors=True)
    except _FAULTS as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
