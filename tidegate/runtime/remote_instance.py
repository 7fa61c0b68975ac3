"""Instances on other nodes, with the same Python interface as the instance in this process.

The channels are those of `tidegate.adapters.grpc_client`. A refusal of a peer arrives as `PeerRefused` with the name of
its exception, and leaves here as that exception. A peer that gives no answer becomes a `WorkerUnreachable`, which no
other process knows of.

Invariant: except for that, a lead cannot distinguish a remote instance from a local one. The tests of
tests/contract/test_instance_port.py run against both. [test_instance_port: repeated_start_and_a_repeated_stop]
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from tidegate.codec import WireError, decode_grants, encode_grant, encode_grants, encode_token
from tidegate.gate import GateClosed, GateDamaged
from tidegate.ownership.records import StaleToken, UnknownGpu
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.crew import WorkerGone, WorkerRefused, WorkerUnreachable
from tidegate.runtime.instance import DEADLINE_MARGIN_S
from tidegate.runtime.launch import LauncherGone, LaunchRefused
from tidegate.runtime.snapshots import SnapshotUnavailable, StaleSnapshot
from tidegate.types import Grant, JobId
from tidegate.v1 import instance_pb2, instance_pb2_grpc, types_pb2
from tidegate.v1 import workers_pb2 as wire

_NAMED_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        GateClosed,
        GateDamaged,
        LaunchRefused,
        LauncherGone,
        SnapshotUnavailable,
        StaleSnapshot,
        StaleToken,
        TimeoutError,
        UnknownGpu,
        ValueError,
        WireError,
        WorkerGone,
        WorkerRefused,
        WorkerUnreachable,
    )
}


class RemoteInstance:
    """An instance behind a channel. `timeout_s` bounds starts, stops and transfers, but not a worker's calls."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float) -> None:
        self._stub = instance_pb2_grpc.InstanceStub(channel)
        self._timeout_s = timeout_s

    async def start_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> None:
        """Starts workers through the gate until they are ready for calls. If one fails, none of them runs."""
        request = instance_pb2.StartWorkersRequest(job=job, transition_id=transition, grants=encode_grants(grants))
        with _errors_as_named():
            await self._stub.StartWorkers(request, timeout=self._timeout_s)

    async def stop_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> int:
        """Stops these workers. Returns, when their gates are free, the bytes of device memory still in use.

        A worker that does not exist counts as stopped.
        """
        request = instance_pb2.StopWorkersRequest(job=job, transition_id=transition, grants=encode_grants(grants))
        with _errors_as_named():
            return (await self._stub.StopWorkers(request, timeout=self._timeout_s)).held_bytes

    async def stand_down(self, job: JobId, grants: Sequence[Grant]) -> None:
        """The workers give their GPUs back and become standbys. Returns when their gates are free."""
        request = instance_pb2.StandDownRequest(job=job, grants=encode_grants(grants))
        with _errors_as_named():
            await self._stub.StandDown(request, timeout=self._timeout_s)

    async def workers(self, job: JobId) -> tuple[Grant, ...]:
        """The grants of the living workers."""
        with _errors_as_named():
            request = instance_pb2.DescribeWorkersRequest(job=job)
            return decode_grants((await self._stub.DescribeWorkers(request, timeout=self._timeout_s)).workers)

    async def call(
        self, grant: Grant, call: wire.WorkerCall, *, timeout_s: float
    ) -> AsyncGenerator[wire.WorkerReply, None]:
        """Yields the replies as they come.

        WorkerGone, WorkerUnreachable, WorkerRefused (nothing changed) or TimeoutError.
        """
        addressed = wire.WorkerCall()
        addressed.CopyFrom(call)
        addressed.gpu = grant.gpu
        addressed.token.CopyFrom(encode_token(grant.token))
        request = instance_pb2.CallRequest(call=addressed)
        with _errors_as_named():
            responses = self._stub.Call(request, timeout=timeout_s + DEADLINE_MARGIN_S)
            try:
                async for response in responses:
                    if response.reply.error:
                        raise (WorkerGone if response.reply.fatal else WorkerRefused)(response.reply.error)
                    yield response.reply
            finally:
                responses.cancel()

    async def store_address(self, grant: Grant) -> tuple[str, int]:
        """The address at which the torch store of a world that this worker leads listens."""
        with _errors_as_named():
            request = instance_pb2.ReserveStoreRequest(grant=encode_grant(grant))
            reserved = await self._stub.ReserveStore(request, timeout=self._timeout_s)
        return reserved.host, reserved.port

    async def fetch_snapshot(self, snapshot: types_pb2.Snapshot) -> str:
        """The folder on its node that has the snapshot's files, verified."""
        with _errors_as_named():
            request = instance_pb2.FetchSnapshotRequest(snapshot=snapshot)
            return (await self._stub.FetchSnapshot(request, timeout=self._timeout_s)).folder

    async def drop_snapshots(self, job: JobId, *, before_version: int, keep: Sequence[int]) -> None:
        request = instance_pb2.DropSnapshotsRequest(job=job, before_version=before_version, keep_versions=keep)
        with _errors_as_named():
            await self._stub.DropSnapshots(request, timeout=self._timeout_s)


class GrpcShardSource:
    """Reads snapshot files from the instances that serve them. `connect` gives the channel to an endpoint."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel]) -> None:
        self._connect = connect

    async def read(
        self, snapshot: types_pb2.Snapshot, shard: types_pb2.SnapshotShard, *, timeout_s: float
    ) -> AsyncIterator[bytes]:
        """The bytes of the file in order. SnapshotUnavailable, StaleSnapshot or WorkerUnreachable."""
        request = instance_pb2.FetchShardRequest(
            job=snapshot.job,
            incarnation=snapshot.incarnation,
            version=snapshot.version,
            file=shard.file,
            grants=snapshot.grants,
        )
        stub = instance_pb2_grpc.WeightsStub(self._connect(shard.endpoint))
        with _errors_as_named():
            async for response in stub.FetchShard(request, timeout=timeout_s):
                yield response.chunk


@contextmanager
def _errors_as_named() -> Iterator[None]:
    try:
        yield
    except PeerUnavailable as error:
        raise WorkerUnreachable(str(error)) from error
    except PeerRefused as error:
        named = _NAMED_ERRORS.get(error.error)
        if named is None:
            raise
        raise named(str(error)) from error
