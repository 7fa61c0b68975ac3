"""Weights from one node's host memory to another's, over real gRPC."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.runtime.nodes import JOB, Node, grant, services_of
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import RpcServer, serve
from tidegate.checksums import combined_checksum
from tidegate.codec import encode_grants
from tidegate.ports.rpc import PeerRefused
from tidegate.runtime.crew import WorkerGone
from tidegate.runtime.instance import CHUNK_BYTES
from tidegate.runtime.remote_instance import GrpcShardSource, RemoteInstance
from tidegate.runtime.snapshots import SnapshotUnavailable, StaleSnapshot
from tidegate.runtime.subprocess_launcher import SubprocessLauncher
from tidegate.v1 import instance_pb2, instance_pb2_grpc, types_pb2

DATA = os.urandom(2 * CHUNK_BYTES + 17)


class TwoNodes:
    """n0 wrote a snapshot and serves it; n1 reads. `reader` is n1's instance as a lead on n0 sees it."""

    def __init__(self, writer: Node, server: RpcServer, reader: RemoteInstance, channels: Channels) -> None:
        self.writer, self.server, self.reader, self.channels = writer, server, reader, channels

    def written(self, *, counter: int = 2, version: int = 4) -> types_pb2.Snapshot:
        folder = self.writer.snapshots.folder(JOB, incarnation=1, version=version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank-0.safetensors").write_bytes(DATA)
        shard = types_pb2.SnapshotShard(
            node="n0",
            endpoint=self.server.endpoint,
            file="rank-0.safetensors",
            size_bytes=len(DATA),
            checksum=hashlib.blake2b(DATA, digest_size=16).hexdigest(),
        )
        return types_pb2.Snapshot(
            job=JOB,
            incarnation=1,
            version=version,
            shards=[shard],
            checksum=combined_checksum({shard.file: shard.checksum}),
            grants=encode_grants([grant(counter=counter)]),
        )


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[TwoNodes]:
    channels = Channels(default_timeout_s=60)
    source, launcher = GrpcShardSource(channels.connect), SubprocessLauncher()
    writer, reader = (Node(name, tmp_path, launcher, source=source) for name in ("n0", "n1"))
    servers = [await serve(services_of(node), "127.0.0.1:0") for node in (writer, reader)]
    yield TwoNodes(writer, servers[0], RemoteInstance(channels.connect(servers[1].endpoint), timeout_s=60), channels)
    for server in servers:
        await server.stop(grace_s=0)
    await channels.close()


async def test_a_snapshot_travels_to_the_node_that_asks_for_it(nodes: TwoNodes, tmp_path: Path) -> None:
    folder = await nodes.reader.fetch_snapshot(nodes.written())
    assert Path(folder) == tmp_path / "n1" / "snapshots" / JOB / "1" / "4"
    assert (Path(folder) / "rank-0.safetensors").read_bytes() == DATA


async def test_a_dropped_version_and_a_superseded_writer_are_named_in_the_error(nodes: TwoNodes) -> None:
    gone = nodes.written()
    await nodes.writer.instance.drop_snapshots(JOB, before_version=5, keep=[])
    with pytest.raises(SnapshotUnavailable, match="is not on node n0"):
        await nodes.reader.fetch_snapshot(gone)
    await nodes.reader.fetch_snapshot(nodes.written(version=5, counter=9))
    with pytest.raises(StaleSnapshot, match=r"1\.8"):
        await nodes.reader.fetch_snapshot(nodes.written(version=6, counter=8))


async def test_a_writer_that_does_not_answer_is_reported_as_gone(nodes: TwoNodes) -> None:
    snapshot = nodes.written()
    await nodes.server.stop(grace_s=0)
    with pytest.raises(WorkerGone, match="FetchShard"):
        await nodes.reader.fetch_snapshot(snapshot)


@pytest.mark.parametrize("file", ["../../../gate/n0%2F0.json", "/etc/hostname", ".."])
async def test_no_name_leads_out_of_the_snapshots(nodes: TwoNodes, file: str) -> None:
    stub = instance_pb2_grpc.WeightsStub(nodes.channels.connect(nodes.server.endpoint))
    request = instance_pb2.FetchShardRequest(job=JOB, incarnation=1, version=4, file=file)
    with pytest.raises(PeerRefused, match="plain file name"):
        [response async for response in stub.FetchShard(request, timeout=5)]
