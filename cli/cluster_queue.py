"""What commands ask of a cluster's queue: the jobs, their GPUs, and the end of some.

Invariant: the jobs of a cluster that is down are told too, from the queue's files.
[test_cluster_queue: that_is_down_is_told]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.cluster_access import KeptElsewhere, NoCluster, NotYet, agent_pid, cluster_of, keeper_elsewhere
from cli.jobs import UnknownJob
from cli.rows import Form, Row, show
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.keepers import SILENT_S
from tidegate.cluster.kept_queue import KeptQueue
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.ports.rpc import PeerUnavailable
from tidegate.v1 import cluster_pb2

ANSWER_S = 15.0
"""The scheduler is started again within a second, and takes 2 s on an idle machine."""
NEXT_KEEPER_S = SILENT_S + 60.0
"""Another machine takes over, starts its servers, and reads the queue."""
_LOOK_AGAIN_S = 0.05
_FOLLOW_S = 0.5
DOWN = "the cluster is down: tidegate up goes on with it"


async def wait(jobs: Collection[str], output_dir: Path, form: Form) -> int:
    """Waits for the end of these jobs, or of all, those that come meanwhile too. The exit code: 1 where one of them has
    not finished. NoCluster, UnknownJob."""
    folder = ClusterFolder.of(output_dir)
    known = await _listed(folder)
    if unknown := sorted({*jobs}.difference(each.job for each in known)):
        has = ", ".join(sorted(each.job for each in known)) or "none"
        raise UnknownJob(f"the cluster of {output_dir} has no job {', '.join(unknown)}; it has {has}")
    ended = await until_ended(folder, jobs)
    rows = [row_of(each) for each in ended]
    empty = f"all jobs of the cluster of {output_dir} have ended"
    show(rows, ("job", "state", "starts", "message"), form=form, out=sys.stdout, empty=empty)
    return int(any(each.end != "finished" for each in ended))


async def until_ended(folder: ClusterFolder, jobs: Collection[str]) -> list[cluster_pb2.Submission]:
    """These jobs, or all that have not ended, once none is left. Each change is told on stderr. NoCluster: the cluster
    ended, or has forgotten a job."""
    seen: dict[str, cluster_pb2.Submission] = {}
    patience_s = NEXT_KEEPER_S if folder.is_of_several else ANSWER_S
    while True:
        there = await _listed(folder, patience_s=patience_s)
        if gone := sorted({*jobs}.difference(each.job for each in there)):
            raise NoCluster(f"the cluster has ended and forgotten {', '.join(gone)}: the job's folder has its end")
        for each in there:
            if each.job in jobs or (not jobs and (each.job in seen or each.state != "ended")):
                if (told := _told(each)) != (_told(seen[each.job]) if each.job in seen else ""):
                    print(f"tidegate: job {each.job} {told}", file=sys.stderr)
                seen[each.job] = each
        if all(each.state == "ended" for each in seen.values()):
            return list(seen.values())
        await asyncio.sleep(_FOLLOW_S)


def _told(each: cluster_pb2.Submission) -> str:
    state = each.end or f"is {each.state}"
    return f"{state}: {each.message}" if each.message or each.end else state


@contextmanager
def _or_none() -> Iterator[None]:
    try:
        yield
    except KeptElsewhere as error:
        print(f"tidegate: {error}", file=sys.stderr)
    except NoCluster:
        pass


async def submissions(output_dir: Path) -> list[cluster_pb2.Submission]:
    """Those of the cluster of this folder, of one that is down too. Another machine that keeps it is told."""
    folder = ClusterFolder.of(output_dir)
    try:
        return await _listed(folder)
    except KeptElsewhere as error:
        print(f"tidegate: {error}", file=sys.stderr)
    except NoCluster:
        return _kept(folder)
    return []


def _kept(folder: ClusterFolder) -> list[cluster_pb2.Submission]:
    """Of a cluster that is down."""
    try:
        jobs = KeptQueue(folder.queue).read().jobs
    except OSError as error:
        print(f"tidegate: the queue of {folder.root.parent} cannot be read: {error}", file=sys.stderr)
        return []
    return [_encoded(Submission.parse(each.record)) for each in jobs.values()]


def _encoded(each: Submission) -> cluster_pb2.Submission:
    message = each.message if each.state is SubmissionState.ENDED else DOWN
    return cluster_pb2.Submission(job=each.job, state=each.state, end=each.end, message=message)


async def _listed(folder: ClusterFolder, *, patience_s: float = ANSWER_S) -> list[cluster_pb2.Submission]:
    """All jobs. A scheduler that died is there again within seconds: it is asked until then. NoCluster."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            async with cluster_of(folder) as cluster:
                return list((await cluster.ListSubmissions(cluster_pb2.ListSubmissionsRequest())).submissions)
        except PeerUnavailable as error:
            if agent_pid(folder) is None and keeper_elsewhere(folder) is None:
                raise NoCluster(f"the cluster in {folder.root.parent} was killed: start it with tidegate up") from error
            if time.monotonic() > deadline_s:
                raise
        except NoCluster as error:
            is_between_keepers = patience_s > ANSWER_S and (isinstance(error, NotYet) or type(error) is NoCluster)
            if not is_between_keepers or time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(_LOOK_AGAIN_S)


async def gpus(output_dir: Path) -> cluster_pb2.ListClusterGpusResponse:
    """Those of the cluster of this folder; none where no cluster is up. Another machine that keeps it is told."""
    with _or_none():
        async with cluster_of(ClusterFolder.of(output_dir)) as cluster:
            return await cluster.ListClusterGpus(cluster_pb2.ListClusterGpusRequest())
    return cluster_pb2.ListClusterGpusResponse()


async def cancelled(output_dir: Path, job: str) -> cluster_pb2.Submission | None:
    """Cancels a job of the cluster. None: it does not have the job, or no cluster is up."""
    if not any(each.job == job and each.state != "ended" for each in await submissions(output_dir)):
        return None
    async with cluster_of(ClusterFolder.of(output_dir)) as cluster:
        return (await cluster.CancelSubmission(cluster_pb2.CancelSubmissionRequest(job=job))).submission


def row_of(each: cluster_pb2.Submission) -> Row:
    return {
        "job": each.job,
        "state": each.end or each.state,
        "priority": each.priority,
        "gpus": list(each.gpus),
        "num_gpus": each.num_gpus,
        "node_bytes": each.node_bytes,
        "starts": each.num_starts,
        "message": each.message,
    }
