"""A service instance as its node offers it: its workers, the node's gate and snapshots.

- `LocalInstance` is the `InstancePort` for callers in the instance's own process.
- `InstanceServicer` and `WeightsServicer` offer the same to other processes over gRPC. Their client is
  `tidegate.runtime.remote_instance`.

A refusal is an exception. The server turns it into a status and the exception's name.

Invariants:
- A request that names another job changes nothing. [test_instance_port: another_job_is_refused]
- A request with a bad grant changes nothing. [test_instance_port: bad_grants_on_the_wire]
- A request with a bad path changes nothing. [test_two_nodes: no_name_leads_out_of_the_snapshots]
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from tidegate.codec import decode_grant, decode_grants, encode_gate_state, encode_grants, require
from tidegate.gate import Gate, GateClosed, GateDamaged, GateState
from tidegate.ownership.records import UnknownGpu
from tidegate.runtime.crew import WorkerGone, WorkerRefused
from tidegate.runtime.launch import LaunchRefused
from tidegate.runtime.snapshots import FetchedSnapshot, SnapshotStore, SnapshotUnavailable, StaleSnapshot
from tidegate.runtime.workers import LocalWorkers
from tidegate.types import GpuId, Grant, JobId, NodeId
from tidegate.v1 import instance_pb2, instance_pb2_grpc, types_pb2
from tidegate.v1 import workers_pb2 as wire

STATUSES: Mapping[type[Exception], grpc.StatusCode] = {
    GateClosed: grpc.StatusCode.FAILED_PRECONDITION,
    GateDamaged: grpc.StatusCode.DATA_LOSS,
    LaunchRefused: grpc.StatusCode.FAILED_PRECONDITION,
    SnapshotUnavailable: grpc.StatusCode.NOT_FOUND,
    StaleSnapshot: grpc.StatusCode.FAILED_PRECONDITION,
    WorkerGone: grpc.StatusCode.FAILED_PRECONDITION,
    WorkerRefused: grpc.StatusCode.FAILED_PRECONDITION,
}
"""The refusals of an instance. A client distinguishes them by the exception's name."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

CHUNK_BYTES = 1 << 20
DEADLINE_MARGIN_S = 1.0
"""A caller's gRPC deadline is this much later than the call's own, so that the caller learns which call was late."""


class LocalInstance:
    """This process's instance of one job. It works without gRPC: the lead calls the workers of its own node here."""

    def __init__(
        self,
        job: JobId,
        *,
        node: NodeId,
        gpus: Iterable[GpuId],
        workers: LocalWorkers,
        gate: Gate,
        snapshots: SnapshotStore,
        timeout_s: float,
    ) -> None:
        """`gpus`: those of the node. `timeout_s` bounds the transfer of a snapshot."""
        self.node = node
        self._gpus = frozenset(gpus)
        self._job = job
        self._workers = workers
        self._gate = gate
        self._snapshots = snapshots
        self._timeout_s = timeout_s

    async def start_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> None:
        """Starts workers through the gate until they are ready for calls. If one fails, none of them runs.

        UnknownGpu for a GPU that the node has not: then nothing is started.
        """
        self._check_job(job)
        if strange := sorted({grant.gpu for grant in grants} - self._gpus):
            has = ", ".join(sorted(self._gpus))
            raise UnknownGpu(f"{', '.join(strange)}: no GPU of node {self.node}, which has {has}")
        await self._workers.start(grants)

    async def stop_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> int:
        """Stops these workers. Returns, when their gates are free, the bytes of device memory still in use.

        A worker that does not exist counts as stopped. A slot's memory belongs to its process, so a dead process uses
        none.
        """
        self._check_job(job)
        await self._workers.stop(grants)
        return 0

    async def stand_down(self, job: JobId, grants: Sequence[Grant]) -> None:
        """The workers give their GPUs back and become standbys. Returns when their gates are free."""
        self._check_job(job)
        await self._workers.stand_down(grants)

    async def workers(self, job: JobId) -> tuple[Grant, ...]:
        """The grants of the living workers."""
        self._check_job(job)
        return self._workers.running()

    def call(self, grant: Grant, call: wire.WorkerCall, *, timeout_s: float) -> AsyncGenerator[wire.WorkerReply, None]:
        """Yields the replies as they come. WorkerGone, WorkerRefused (nothing changed) or TimeoutError."""
        return self._workers.call(grant, call, timeout_s=timeout_s)

    async def store_address(self, grant: Grant) -> tuple[str, int]:
        """The address at which the torch store of a world that this worker leads listens."""
        return self._workers.store_address(grant)

    async def fetch_snapshot(self, snapshot: types_pb2.Snapshot) -> str:
        """The folder on this node that has the snapshot's files, verified."""
        return str((await self.fetch(snapshot)).folder)

    async def fetch(self, snapshot: types_pb2.Snapshot) -> FetchedSnapshot:
        self._check_job(snapshot.job)
        return await self._snapshots.fetch(snapshot, timeout_s=self._timeout_s)

    async def drop_snapshots(self, job: JobId, *, before_version: int, keep: Sequence[int]) -> None:
        self.drop(job, before_version=before_version, keep=keep)

    def drop(self, job: str, *, before_version: int, keep: Sequence[int]) -> int:
        """Returns how many versions were dropped."""
        return self._snapshots.drop(self._check_job(job), before_version=before_version, keep=keep)

    async def gate_report(self) -> tuple[GateState, ...]:
        """The state of every GPU of this node, whichever service or job had it."""
        return tuple(self._gate.report())

    async def gates(self) -> Sequence[Grant]:
        """The highest token that ever passed the gate of each GPU of this node."""
        return self._gate.passed()

    def _check_job(self, job: str) -> JobId:
        if job != self._job:
            raise ValueError(f"this instance on node {self.node} serves job {self._job!r}, not {job!r}")
        return self._job


class InstanceServicer(instance_pb2_grpc.InstanceServicer):
    """Offers a `LocalInstance` to other processes. `boot` is the number of this start of the instance."""

    def __init__(self, instance: LocalInstance, *, boot: int) -> None:
        self._instance = instance
        self._boot = boot

    async def StartWorkers(
        self, request: instance_pb2.StartWorkersRequest, context: Context
    ) -> instance_pb2.StartWorkersResponse:
        grants = decode_grants(request.grants)
        await self._instance.start_workers(JobId(request.job), request.transition_id, grants)
        return instance_pb2.StartWorkersResponse(started=request.grants)

    async def StopWorkers(
        self, request: instance_pb2.StopWorkersRequest, context: Context
    ) -> instance_pb2.StopWorkersResponse:
        grants = decode_grants(request.grants)
        held_bytes = await self._instance.stop_workers(JobId(request.job), request.transition_id, grants)
        return instance_pb2.StopWorkersResponse(released=request.grants, held_bytes=held_bytes)

    async def StandDown(
        self, request: instance_pb2.StandDownRequest, context: Context
    ) -> instance_pb2.StandDownResponse:
        await self._instance.stand_down(JobId(request.job), decode_grants(request.grants))
        return instance_pb2.StandDownResponse()

    async def DescribeWorkers(
        self, request: instance_pb2.DescribeWorkersRequest, context: Context
    ) -> instance_pb2.DescribeWorkersResponse:
        grants = await self._instance.workers(JobId(request.job))
        return instance_pb2.DescribeWorkersResponse(workers=encode_grants(grants), boot=self._boot)

    async def Call(
        self, request: instance_pb2.CallRequest, context: Context
    ) -> AsyncIterator[instance_pb2.CallResponse]:
        require(request, "call")
        call = request.call
        require(call, "gpu", "token")
        grant = decode_grant(types_pb2.Grant(gpu=call.gpu, token=call.token))
        try:
            async with aclosing(self._instance.call(grant, call, timeout_s=_time_left(context))) as replies:
                async for reply in replies:
                    yield instance_pb2.CallResponse(reply=reply)
        # These two are answers about the call, and the schema has fields for them.
        except (WorkerRefused, WorkerGone) as error:
            failed = wire.WorkerReply(
                call_id=call.call_id, last=True, error=str(error), fatal=isinstance(error, WorkerGone)
            )
            yield instance_pb2.CallResponse(reply=failed)

    async def FetchSnapshot(
        self, request: instance_pb2.FetchSnapshotRequest, context: Context
    ) -> instance_pb2.FetchSnapshotResponse:
        require(request, "snapshot")
        fetched = await self._instance.fetch(request.snapshot)
        return instance_pb2.FetchSnapshotResponse(folder=str(fetched.folder), fetched_bytes=fetched.fetched_bytes)

    async def DropSnapshots(
        self, request: instance_pb2.DropSnapshotsRequest, context: Context
    ) -> instance_pb2.DropSnapshotsResponse:
        dropped = self._instance.drop(
            request.job, before_version=request.before_version, keep=list(request.keep_versions)
        )
        return instance_pb2.DropSnapshotsResponse(num_dropped=dropped)

    async def ReserveStore(
        self, request: instance_pb2.ReserveStoreRequest, context: Context
    ) -> instance_pb2.ReserveStoreResponse:
        require(request, "grant")
        host, port = await self._instance.store_address(decode_grant(request.grant))
        return instance_pb2.ReserveStoreResponse(host=host, port=port)

    async def GateReport(
        self, request: instance_pb2.GateReportRequest, context: Context
    ) -> instance_pb2.GateReportResponse:
        states = await self._instance.gate_report()
        return instance_pb2.GateReportResponse(
            node=self._instance.node, gpus=[encode_gate_state(state) for state in states]
        )


class WeightsServicer(instance_pb2_grpc.WeightsServicer):
    """Serves this node's snapshot files to other nodes."""

    def __init__(self, snapshots: SnapshotStore) -> None:
        self._snapshots = snapshots

    async def FetchShard(
        self, request: instance_pb2.FetchShardRequest, context: Context
    ) -> AsyncIterator[instance_pb2.FetchShardResponse]:
        path = self._snapshots.file_to_serve(
            request.job,
            incarnation=request.incarnation,
            version=request.version,
            file=request.file,
            grants=request.grants,
        )
        # The file is in host memory: a chunk is read in well under a millisecond.
        with path.open("rb") as stream:  # see above
            while chunk := stream.read(CHUNK_BYTES):
                yield instance_pb2.FetchShardResponse(chunk=chunk)


def _time_left(context: Context) -> float:
    """The time for the call itself. The server admits no call without a deadline."""
    remaining_s = context.time_remaining()
    assert remaining_s is not None
    return max(0.0, remaining_s - DEADLINE_MARGIN_S)
