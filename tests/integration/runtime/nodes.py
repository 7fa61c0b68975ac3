"""Real fork servers and descriptors for the tests of the runtime."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.adapters.grpc_server import Service
from tidegate.gate import Gate
from tidegate.runtime.instance import STATUSES, InstanceServicer, LocalInstance, WeightsServicer
from tidegate.runtime.launch import WorkerFds, WorkerLauncher, WorkerSpec
from tidegate.runtime.snapshots import ShardSource, SnapshotStore
from tidegate.runtime.workers import LocalWorkers, WorkerHome
from tidegate.types import GpuId, Grant, JobId, NodeId, Token, gpu_id
from tidegate.v1 import instance_pb2, instance_pb2_grpc

JOB = JobId("demo")
ENTRIES = "tests.integration.runtime.entries"


def grant(gpu: str = "n0/0", counter: int = 1) -> Grant:
    return Grant(GpuId(gpu), Token(1, counter))


def spec(entry: str, log_path: Path, **env: str) -> WorkerSpec:
    return WorkerSpec(entry=f"{ENTRIES}:{entry}", grant=grant(), log_path=log_path, env=env, works_for="demo actor")


@contextmanager
def fork_server(path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fork server that may run the tests' entries. It is killed at the end if it still runs."""
    command = [sys.executable, "-m", "tidegate.runtime.forkserver", "--socket", str(path), "--allow", "tests."]
    with subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def worker_fds() -> Iterator[tuple[socket.socket, WorkerFds]]:
    """The service's end of a channel, and the descriptors to start its worker with. Both are closed here afterwards."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    given, holds = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        yield ours, WorkerFds(theirs.fileno(), holds.fileno(), listener.fileno())
    finally:
        for sock in (theirs, listener, given, holds):
            sock.close()


class Node:
    """A node's service instance in this process, with its fork server as a separate process."""

    def __init__(self, name: str, folder: Path, launcher: WorkerLauncher, *, source: ShardSource) -> None:
        self.name = NodeId(name)
        self.gate = Gate(folder / name / "gate")
        self.timeline = folder / "timeline" / f"actor@{name}.jsonl"
        self.deaths: asyncio.Queue[tuple[Grant, int]] = asyncio.Queue()
        self.reasons: list[str] = []
        """What the worker said, by death."""
        home = WorkerHome(
            works_for="demo actor",
            entry=f"{ENTRIES}:echo",
            log_dir=folder / "logs",
            timeline=self.timeline,
            stop_timeout_s=20,
            start_timeout_s=20,
        )
        self.workers = LocalWorkers(home, gate=self.gate, launcher=launcher, on_death=self._died)
        self.snapshots = SnapshotStore(folder / name / "snapshots", node=self.name, source=source)
        self.instance = LocalInstance(
            JOB,
            node=self.name,
            gpus=[gpu_id(self.name, index) for index in range(4)],
            workers=self.workers,
            gate=self.gate,
            snapshots=self.snapshots,
            timeout_s=60,
        )

    async def _died(self, died: Grant, exit_status: int, why: str) -> None:
        self.reasons.append(why)
        self.deaths.put_nowait((died, exit_status))


def services_of(node: Node) -> list[Service]:
    """The services that a node's instance serves."""
    instance, weights = InstanceServicer(node.instance, boot=7), WeightsServicer(node.snapshots)
    services = instance_pb2.DESCRIPTOR.services_by_name
    return [
        Service(
            services["Instance"],
            lambda server: instance_pb2_grpc.add_InstanceServicer_to_server(instance, server),
            STATUSES,
        ),
        Service(services["Weights"], lambda server: instance_pb2_grpc.add_WeightsServicer_to_server(weights, server)),
    ]
