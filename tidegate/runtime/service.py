"""The composition root of a component's instance: builds its adapters, runs its host, leaves in order.

    python -m services.ROLE --config PATH --node NODE [--forkserver PATH]

Order of a start: config, logs, bus and store, gate, workers, gRPC, host.
Order of a stop (SIGTERM): the host leaves, gRPC ends, workers end, connections close.

Invariant: everything that was built is closed, however the run ends. [test_stopping: signal_leaves_nothing]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.redis_store import redis_store
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import credential_folder
from tidegate.config.job_config import JobConfig
from tidegate.events import EventSource
from tidegate.gate import Gate
from tidegate.job import JobFolder, gate_folder, load_job, snapshot_root
from tidegate.logs import configure_logging
from tidegate.ports.bus import BusLimits, StreamFull
from tidegate.ports.store import Store
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.component import ComponentServicer
from tidegate.runtime.crew import Crew, InstancePort
from tidegate.runtime.host import ComponentHost, Seat, attach_when_adopted
from tidegate.runtime.instance import STATUSES, InstanceServicer, LocalInstance, WeightsServicer
from tidegate.runtime.launch import WorkerLauncher
from tidegate.runtime.lead import Lead, LeadTools
from tidegate.runtime.processes import ENDS_AGAIN
from tidegate.runtime.reconnecting_launcher import ReconnectingLauncher
from tidegate.runtime.remote_instance import GrpcShardSource, RemoteInstance
from tidegate.runtime.snapshots import SnapshotStore
from tidegate.runtime.subprocess_launcher import SubprocessLauncher
from tidegate.runtime.workers import LocalWorkers, WorkerHome
from tidegate.types import InstanceId, JobId, NodeId, Role, instance_id, job_id, node_of
from tidegate.v1 import commands_pb2, commands_pb2_grpc, instance_pb2, instance_pb2_grpc

FORKSERVER_TIMEOUT_S = 60.0
"""The import of torch and megatron takes 4 s alone on a core, and several times that on a busy machine."""
STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line of an instance. Without a fork server every worker is a process of its own."""

    config: JobConfig
    node: NodeId
    forkserver: Path | None


def parse_arguments(role: Role) -> Arguments:
    """The arguments of this process."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=f"One instance of the {role}.")
    parser.add_argument("--config", type=Path, required=True, help="the job's resolved config.json")
    parser.add_argument("--node", required=True, help="the node's name in the config")
    parser.add_argument("--forkserver", type=Path, help="socket of the node's fork server, where there is one")
    parsed = parser.parse_args()
    return Arguments(JobConfig.read(parsed.config), NodeId(parsed.node), parsed.forkserver)


def run_instance(role: Role, *, worker_entry: str, make_lead: Callable[[LeadTools], Lead]) -> None:
    """The `main` of a component's service. Returns after an orderly stop."""
    arguments = parse_arguments(role)
    instance = instance_id(role, arguments.node)
    configure_logging(instance, path=JobFolder.of(arguments.config).attempt().logs / f"{instance}.jsonl")
    run_service(_Instance(role, arguments, worker_entry=worker_entry, make_lead=make_lead).run())


def run_service(work: Coroutine[Any, Any, None]) -> None:
    """Runs a service to its end. Where the bus takes no more events, the process ends with `ENDS_AGAIN`: what the error
    says has to be done first."""
    try:
        asyncio.run(work)
    except StreamFull as full:
        print(full, file=sys.stderr)
        sys.exit(ENDS_AGAIN)


async def stop_signal() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def connect_bus(
    config: JobConfig, *, name: str, party: Party = Party.SCHEDULER, opens_after: int | None = None
) -> NatsBus:
    """The job's bus, with the limits that all its processes share, for who belongs to `party`.

    `opens_after`: makes the job's streams where they are not there, its events after this sequence. Only the launcher
    does: a service that finds none ends with JobNotOpen, because the bus has lost its data under it.
    """
    bounds = config.runtime
    limits = BusLimits(
        sample_ack_wait_s=bounds.ack_wait_s,
        max_deliveries=bounds.max_deliveries,
        events_max_bytes=bounds.events_max_bytes,
        samples_max_bytes=bounds.samples_max_bytes,
        dead_max_bytes=bounds.dead_max_bytes,
        num_replicas=config.servers.nats_replicas,
    )
    servers = config.servers
    bus = await NatsBus.connect(servers.nats_url, name=name, limits=limits, credential=servers.nats_credential(party))
    job = job_id(config.job)
    try:
        if opens_after is None:
            await bus.streams.require_job(job)
        else:
            await bus.streams.open_job(job, after_sequence=opens_after)
    except BaseException:  # a cancelled start must not leave a connection behind either
        await bus.close()
        raise
    return bus


def connect_store(config: JobConfig, party: Party = Party.SCHEDULER) -> Store:
    """The store, for who belongs to `party`. CertsError."""
    servers = config.servers
    credential = servers.redis_credential(party)
    return redis_store(servers.redis_url, credential=credential, num_replicas=servers.redis_replicas)


class _Instance:
    def __init__(
        self, role: Role, arguments: Arguments, *, worker_entry: str, make_lead: Callable[[LeadTools], Lead]
    ) -> None:
        self._role = role
        self._arguments = arguments
        self._config = arguments.config
        self._job_id: JobId = job_id(self._config.job)
        self._name: InstanceId = instance_id(role, arguments.node)
        self._folder = JobFolder.of(self._config)
        self._attempt = self._folder.attempt()
        self._worker_entry = worker_entry
        self._make_lead = make_lead
        self._host: ComponentHost | None = None

    async def run(self) -> None:
        stopping = await stop_signal()
        config, times = self._config, self._config.runtime
        tls = Credentials(credential_folder(Path(times.host_memory_root), Party.JOB))
        job = load_job(config)
        async with contextlib.AsyncExitStack() as closing:
            bus = await connect_bus(config, name=self._name, party=Party.JOB)
            closing.push_async_callback(bus.close)
            store = connect_store(config, Party.JOB)
            closing.push_async_callback(store.aclose)
            await attach_when_adopted(store)
            boot = await store.next_boot(self._job_id, self._name)
            source = EventSource(self._name, role=self._role, boot=boot, now_ns=time.time_ns)
            announcer = Announcer(bus.events, source, self._job_id)
            channels = Channels(default_timeout_s=times.command_deadline_s, tls=tls)
            closing.push_async_callback(channels.close)
            connect_own = functools.partial(channels.connect, peer=tls.identity)
            shards = GrpcShardSource(connect_own)
            snapshots = SnapshotStore(
                snapshot_root(config, self._arguments.node), node=self._arguments.node, source=shards
            )
            local = await self._local_instance(snapshots, closing)
            component = ComponentServicer(self._job_id, self._lead_host, store)
            services = _services(component, InstanceServicer(local, boot=boot), WeightsServicer(snapshots))
            server = await serve(services, f"{config.cluster.address_of(self._arguments.node)}:0", tls=tls)
            closing.push_async_callback(lambda: server.stop(grace_s=STOP_GRACE_S))

            def connect(instance: str, endpoint: str) -> InstancePort:
                if instance == self._name:
                    return local
                return RemoteInstance(connect_own(endpoint), timeout_s=times.command_deadline_s)

            def make_lead() -> Lead:
                crew = Crew(
                    self._job_id,
                    connect,
                    call_timeout_s=times.command_deadline_s,
                    work_timeout_s=times.work_timeout_s,
                )
                tools = LeadTools(self._arguments.node, job, self._folder, crew, bus.samples, announcer, store)
                return self._make_lead(tools)

            seat = Seat(self._job_id, self._role, self._name, boot, server.endpoint)
            self._host = ComponentHost(
                seat,
                store=store,
                announcer=announcer,
                times=times,
                make_lead=make_lead,
                gates=local.gates,
            )
            structlog.get_logger("service").info("serving", endpoint=server.endpoint, boot=boot, pid=os.getpid())
            await self._host.run(stopping)

    def _lead_host(self) -> ComponentHost:
        assert self._host is not None, "a command arrived before the host was made"
        return self._host

    def _launcher(self) -> WorkerLauncher:
        if self._arguments.forkserver is None:
            return SubprocessLauncher()
        return ReconnectingLauncher(self._arguments.forkserver, timeout_s=FORKSERVER_TIMEOUT_S)

    async def _local_instance(self, snapshots: SnapshotStore, closing: contextlib.AsyncExitStack) -> LocalInstance:
        node, times = self._arguments.node, self._config.runtime
        gate = Gate(gate_folder(self._config, node))
        launcher = self._launcher()
        closing.push_async_callback(launcher.close)
        home = WorkerHome(
            entry=self._worker_entry,
            log_dir=self._attempt.logs / str(self._role),
            timeline=self._attempt.timeline / f"{self._name}.jsonl",
            works_for=f"{self._config.job} {self._role}",
            address=self._config.cluster.address_of(node),
            start_timeout_s=times.command_deadline_s,
        )
        workers = LocalWorkers(
            home,
            gate=gate,
            launcher=launcher,
            on_death=lambda grant, status, why: self._lead_host().report_death(grant, status, why),
        )
        closing.push_async_callback(workers.aclose)
        return LocalInstance(
            self._job_id,
            node=node,
            gpus=[gpu for gpu in self._config.cluster.gpus() if node_of(gpu) == node],
            workers=workers,
            gate=gate,
            snapshots=snapshots,
            timeout_s=times.command_deadline_s,
        )


def _services(component: ComponentServicer, instance: InstanceServicer, weights: WeightsServicer) -> list[Service]:
    commands, instances = commands_pb2.DESCRIPTOR.services_by_name, instance_pb2.DESCRIPTOR.services_by_name
    return [
        Service(
            commands["Component"], lambda server: commands_pb2_grpc.add_ComponentServicer_to_server(component, server)
        ),
        Service(
            instances["Instance"],
            lambda server: instance_pb2_grpc.add_InstanceServicer_to_server(instance, server),
            STATUSES,
        ),
        Service(
            instances["Weights"],
            lambda server: instance_pb2_grpc.add_WeightsServicer_to_server(weights, server),
            STATUSES,
        ),
    ]
