"""Run one replica of the cluster's scheduler: `python -m services.scheduler.cluster --folder PATH`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
import structlog

from services.scheduler.cluster.command_line import CommandLineServicer
from services.scheduler.cluster.control import ClusterServicer, UnknownNode, UnknownSubmission
from services.scheduler.cluster.job_control import jobs_control
from services.scheduler.cluster.loop import BEAT_S, ClusterLoop, KeptQueueAway
from services.scheduler.shell.control import write_endpoint
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.redis_store import redis_store
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Party
from tidegate.cluster.credentials import AGENT, ClusterCredentials
from tidegate.cluster.far_commands import KEEPALIVE_S
from tidegate.cluster.folder import ClusterDescription, ClusterFolder
from tidegate.cluster.kept_queue import KeptQueue
from tidegate.logs import configure_logging
from tidegate.ports.bus import BusLimits
from tidegate.ports.store import Store
from tidegate.runtime.service import STOP_GRACE_S, stop_signal
from tidegate.types import LOOPBACK
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc

SOURCE = "cluster"
CALL_TIMEOUT_S = 10.0
TRY_AGAIN_S = 5.0


async def run(folder: ClusterFolder, cluster: ClusterDescription) -> None:
    """Adopt the store, serve the Cluster API, and run the loop until SIGTERM."""
    stopping = await stop_signal()
    credentials = ClusterCredentials(Path(cluster.credentials))
    own = credentials.of(Party.SCHEDULER)
    tls = Credentials(own)
    async with contextlib.AsyncExitStack() as closing:
        bus = await NatsBus.connect(cluster.nats_url, name=SOURCE, limits=BusLimits(), credential=own)
        closing.push_async_callback(bus.close)
        store: Store = redis_store(cluster.redis_url, credential=own)
        closing.push_async_callback(store.aclose)
        channels = Channels(default_timeout_s=CALL_TIMEOUT_S, tls=tls)
        closing.push_async_callback(channels.close)
        agent = cluster_pb2_grpc.NodeStub(channels.connect(cluster.agent, AGENT))
        loop = ClusterLoop(store, bus.term, bus.streams, agent, KeptQueue(folder.queue))
        while not stopping.is_set():
            try:
                await loop.open()
                break
            except KeptQueueAway as error:
                structlog.get_logger(SOURCE).error("cannot begin", error=str(error))
                await asyncio.sleep(BEAT_S)
        servicer = ClusterServicer(loop, store, cluster)
        descriptor = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"]
        served = Service(
            descriptor,
            lambda server: cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, server),
            {
                UnknownSubmission: grpc.StatusCode.NOT_FOUND,
                UnknownNode: grpc.StatusCode.NOT_FOUND,
                KeptQueueAway: grpc.StatusCode.FAILED_PRECONDITION,
            },
        )
        server = await serve([served], f"{LOOPBACK}:0", tls=tls)
        closing.push_async_callback(lambda: server.stop(grace_s=STOP_GRACE_S))
        write = partial(
            write_endpoint,
            folder.endpoint,
            endpoint=server.endpoint,
            pid=os.getpid(),
            credential=credentials.of(Party.OPERATOR),
        )
        others = partial(_serve_others, folder.root.parent, cluster, served, closing)
        far = await others()
        write(far=far or "")
        structlog.get_logger(SOURCE).info("serving", endpoint=server.endpoint, pid=os.getpid())
        trying = [asyncio.create_task(_until_served(others, write))] if far is None else []
        try:
            await loop.run(stopping)
        finally:
            for task in trying:
                task.cancel()
            await asyncio.gather(*trying, return_exceptions=True)


async def _serve_others(
    output_dir: Path, cluster: ClusterDescription, queue: Service, closing: contextlib.AsyncExitStack
) -> str | None:
    """Where other machines are answered; empty: they are not to be. None: something else has the port now, or the
    credential cannot be read. The cluster goes on without."""
    if not cluster.node_credentials:
        return ""
    commands = CommandLineServicer(output_dir)
    try:
        server = await serve(
            [queue, jobs_control(output_dir), commands.service()],
            f"{cluster.address}:{cluster.command_port}",
            tls=Credentials(Path(cluster.node_credentials)),
            keepalive_s=KEEPALIVE_S,
        )
    except (ValueError, CertsError) as error:
        structlog.get_logger(SOURCE).error("cannot answer other machines", error=str(error))
        return None
    closing.push_async_callback(commands.aclose)
    closing.push_async_callback(lambda: server.stop(grace_s=STOP_GRACE_S))
    return server.endpoint


async def _until_served(others: Callable[[], Awaitable[str | None]], write: Callable[..., None]) -> None:
    far = None
    while far is None:
        await asyncio.sleep(TRY_AGAIN_S)  # nothing tells that a port is free
        far = await others()
    write(far=far)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.scheduler.cluster", description="One replica of the cluster's scheduler."
    )
    parser.add_argument("--folder", type=Path, required=True, help="the cluster's folder")
    folder = ClusterFolder(parser.parse_args().folder)
    configure_logging(SOURCE, path=folder.logs / f"{SOURCE}.jsonl")
    asyncio.run(run(folder, ClusterDescription.parse(folder.description.read_bytes())))


if __name__ == "__main__":
    main()
