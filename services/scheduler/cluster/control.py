"""The Cluster API: people submit jobs, look at the queue, and cancel.

Invariants:
- A job that can never run is refused before anything is written. [test_cluster_loop: that_can_never_run]
- A job that is queued or runs is not submitted a second time. [test_cluster_loop: a_second_time]
- A job that the cluster has is not restored. [test_cluster_loop: job_that_is_there_stays]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from typing import Any

from services.scheduler.cluster.loop import ClusterLoop, parsed
from services.scheduler.cluster.queue import by_turn, in_turn, why_never
from services.scheduler.shell.control import gpu_statuses
from tidegate.cluster.backup import BackedUpJob
from tidegate.cluster.drained import keeping
from tidegate.cluster.folder import ClusterDescription
from tidegate.cluster.placement import misfit, needs_of
from tidegate.cluster.submission_codec import encode_submission
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.config.job_config import JobConfig
from tidegate.ports.store import Store
from tidegate.short_lists import counted
from tidegate.sizes import host_memory_text
from tidegate.types import Drain, JobId, NodeId, job_id, node_of
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc


class UnknownSubmission(LookupError):
    """The cluster has no such job."""


class UnknownNode(LookupError):
    """The cluster has no such node."""


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, loop: ClusterLoop, store: Store, cluster: ClusterDescription) -> None:
        self._loop = loop
        self._store = store
        self._cluster = cluster

    async def SubmitJob(self, request: cluster_pb2.SubmitJobRequest, context: Any) -> cluster_pb2.SubmitJobResponse:
        config = JobConfig.from_json(request.config)
        memory, num_bytes = self._loop.memory, request.node_bytes
        if (fault := misfit(config, self._cluster.slots, node_bytes=num_bytes, memory=memory)) is not None:
            raise ValueError(fault)
        new = Submission(
            job=job_id(config.job),
            config=await self._store.keep_config(job_id(config.job), config.to_json()),
            treatment=Treatment(request.treatment),
            priority=request.priority,
            submitted_unix_ms=await self._store.now_unix_ms(),
            command=request.command,
            needs=needs_of(config),
            node_bytes=num_bytes,
        )

        def queued(known: Submission | None) -> Submission:
            if known is None:
                return new
            if known.state is not SubmissionState.ENDED:
                raise ValueError(
                    f"job {new.job} is {known.state} already: wait for its end, cancel it, or give this one another "
                    "name (job=NAME)"
                )
            if not known.is_cleared:
                raise ValueError(f"job {new.job} has just ended, and its data is being cleared away: try again")
            return replace(new, starts=known.starts)

        found = await self._loop.change(new.job, queued)
        return cluster_pb2.SubmitJobResponse(submission=_encoded(found))

    async def ListSubmissions(
        self, request: cluster_pb2.ListSubmissionsRequest, context: Any
    ) -> cluster_pb2.ListSubmissionsResponse:
        stored = await self._loop.stored()
        found = parsed(stored.texts)
        nodes, away = self._cluster.slots.nodes, {NodeId(each.node) for each in self._loop.away}
        drained = stored.drained.keys() & nodes

        @cache
        def never(needs: tuple[int, ...], node_bytes: int) -> str:
            return why_never(needs, nodes, self._loop.memory, node_bytes=node_bytes, drained=drained, away=away)

        @cache
        def has_room(needs: tuple[int, ...], node_bytes: int) -> bool:
            return not why_never(needs, nodes, self._loop.memory, node_bytes=node_bytes)

        def why(each: Submission) -> str:
            paused = f"the queue is paused: {stored.paused}" if stored.paused else ""
            return "; ".join(filter(None, (paused, never(each.needs, each.node_bytes))))

        queue = in_turn(found.values())
        # Others pass a job for which the cluster has no room.
        passing = [each for each in queue if has_room(each.needs, each.node_bytes)]
        ahead = dict.fromkeys((each.job for each in queue), 0)
        ahead |= {each.job: number for number, each in enumerate(passing)}
        return cluster_pb2.ListSubmissionsResponse(
            submissions=[
                _encoded(each, num_ahead=ahead[each.job], why=why(each)) if each.job in ahead else _encoded(each)
                for each in found.values()
            ]
        )

    async def ListClusterGpus(
        self, request: cluster_pb2.ListClusterGpusRequest, context: Any
    ) -> cluster_pb2.ListClusterGpusResponse:
        stored = await self._loop.stored()
        # The map remembers GPUs of nodes that the cluster had earlier.
        there = {
            gpu: each for gpu, each in (await self._loop.gpus()).items() if node_of(gpu) in self._cluster.slots.nodes
        }
        gpus = gpu_statuses(there)
        return cluster_pb2.ListClusterGpusResponse(
            gpus=gpus,
            drained_nodes=sorted(stored.drained),
            nodes_keeping_jobs=keeping(stored.drained),
            paused=stored.paused,
            away=self._loop.away,
            places=self._loop.places,
        )

    async def GetNodeMachine(
        self, request: cluster_pb2.GetNodeMachineRequest, context: Any
    ) -> cluster_pb2.GetNodeMachineResponse:
        return await self._loop.machine_of(self._known(request.node))

    async def DrainNode(self, request: cluster_pb2.DrainNodeRequest, context: Any) -> cluster_pb2.DrainNodeResponse:
        drain = None if request.undo else Drain.STAY if request.keeps_jobs else Drain.LEAVE
        drained = (await self._loop.drain(self._known(request.node), drain)).drained
        return cluster_pb2.DrainNodeResponse(drained_nodes=sorted(drained), nodes_keeping_jobs=keeping(drained))

    async def PauseQueue(self, request: cluster_pb2.PauseQueueRequest, context: Any) -> cluster_pb2.PauseQueueResponse:
        reason = " ".join(request.reason.split())
        if not (reason or request.undo):
            raise ValueError("a pause needs a reason, which people read")
        return cluster_pb2.PauseQueueResponse(paused=(await self._loop.pause("" if request.undo else reason)).paused)

    async def CancelSubmission(
        self, request: cluster_pb2.CancelSubmissionRequest, context: Any
    ) -> cluster_pb2.CancelSubmissionResponse:
        job = JobId(request.job)

        def cancelled(known: Submission | None) -> Submission:
            if known is None:
                raise UnknownSubmission(f"the cluster has no job {job!r}")
            if known.state is SubmissionState.ENDED:
                raise ValueError(f"job {job} is over already ({known.end}): there is nothing to cancel")
            return replace(known, is_cancelled=True, reason=known.reason or request.reason)

        return cluster_pb2.CancelSubmissionResponse(submission=_encoded(await self._loop.change(job, cancelled)))

    def _known(self, name: str) -> NodeId:
        node, there = NodeId(name), self._cluster.slots.nodes
        if node not in there:
            raise UnknownNode(f"the cluster has no node {name!r}: it has {', '.join(there)}")
        return node

    async def BackUpJobs(
        self, request: cluster_pb2.BackUpJobsRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.BackUpJobsResponse]:
        found = await self._loop.submissions()
        over = [each for each in found.values() if each.state is SubmissionState.ENDED]
        for each in by_turn(each for each in found.values() if each.state is not SubmissionState.ENDED):
            record, config = each, await self._store.config_of(each.job, each.config)
            if config is None:  # Its end, or another job of this name, may have come in between.
                record = (await self._loop.submissions()).get(each.job, each)
                config = await self._store.config_of(record.job, record.config)
            job = cluster_pb2.BackedUpJob(record=record.to_json(), config=config or "")
            yield cluster_pb2.BackUpJobsResponse(job=job)
        for each in over:
            yield cluster_pb2.BackUpJobsResponse(job=cluster_pb2.BackedUpJob(record=each.to_json()))

    async def RestoreJob(self, request: cluster_pb2.RestoreJobRequest, context: Any) -> cluster_pb2.RestoreJobResponse:
        new = BackedUpJob(request.job.record.decode(), request.job.config).restored()
        known = (await self._loop.submissions()).get(new.job)
        if known is None and new.state is not SubmissionState.ENDED:
            await self._store.keep_config(new.job, request.job.config)

        def queued(found: Submission | None) -> Submission:
            nonlocal known
            known = found
            return new if found is None else found

        found = await self._loop.change(new.job, queued)
        return cluster_pb2.RestoreJobResponse(submission=_encoded(found), was_known=known is not None)


def _encoded(each: Submission, *, num_ahead: int | None = None, why: str = "") -> cluster_pb2.Submission:
    """`num_ahead`: the jobs before it in the queue. `why`: it is not placed, besides these."""
    if num_ahead is not None:
        behind = f", behind {counted(num_ahead, 'job')}" if num_ahead else ""
        memory = host_memory_text(each.node_bytes, before=" and ")
        waits = f"waits for {counted(each.num_gpus, 'GPU')}{memory}{behind}"
        return encode_submission(each, message="; ".join(filter(None, (waits, why, each.message))))
    return encode_submission(each, message=each.message)
