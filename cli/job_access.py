"""The way to a job's Control API: on this machine, or through the machine that keeps the job's cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cli.cluster_access import channel_to, keeper_elsewhere, named
from cli.queue_files import word_of
from tidegate.cluster.folder import ClusterFolder
from tidegate.job import JobFolder
from tidegate.launcher.control import NotRunning
from tidegate.launcher.control import control_of as control_here
from tidegate.launcher.lock import launcher_pid, runs_elsewhere
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.v1 import control_pb2, control_pb2_grpc


@asynccontextmanager
async def control_of(folder: JobFolder) -> AsyncIterator[control_pb2_grpc.ControlAsyncStub]:
    """A stub of the job's Control API, after a first answer. Where another machine keeps the job's cluster, that one
    passes the calls on. NotRunning: it gives no answer, then or later."""
    cluster, job = ClusterFolder.of(folder.root.parent), folder.root.name
    keeper = keeper_elsewhere(cluster)
    if keeper is None or not runs_elsewhere(folder):
        try:
            async with control_here(folder) as control:
                yield control
        except NotRunning as error:
            queued = word_of(folder)
            if queued is None or queued.state == "ended" or folder.result.exists() or launcher_pid(folder) is not None:
                raise
            raise NotRunning(f"job {job} does not run now; {queued.message or f'it is {queued.state}'}") from error
        return
    async with channel_to(cluster, keeper) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        try:
            await control.GetJob(control_pb2.GetJobRequest(job=job))
            yield control
        except PeerUnavailable as error:
            raise NotRunning(f"job {job} gave no answer by {named(keeper, cluster)}; try again") from error
        except PeerRefused as refused:
            if refused.error == NotRunning.__name__:
                raise NotRunning(refused.reason) from refused
            if refused.status == "UNIMPLEMENTED":
                told = f"{keeper.name} keeps the cluster with another release, which passes nothing on to jobs"
                raise NotRunning(told) from refused
            raise
