"""What commands ask of a cluster's queue: the jobs, their GPUs, and the end of some.

Invariant: the jobs of a cluster that is down are told too, from the queue's files.
[test_cluster_queue: that_is_down_is_told]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from cli.cluster_access import ClusterDown, KeptElsewhere, NoCluster, cluster_of
from cli.jobs import UnknownJob
from cli.queue_files import kept_submissions, word_of
from cli.rows import Form, Row, answer_text, show
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.keepers import SILENT_S
from tidegate.job import JobFolder, command_in
from tidegate.launcher.lock import launcher_pid
from tidegate.ports.rpc import PeerUnavailable
from tidegate.short_lists import first_few
from tidegate.v1 import cluster_pb2

ANSWER_S = 30.0
"""The scheduler is started again within a second, and takes 2 s on an idle machine."""
NEXT_KEEPER_S = SILENT_S + 60.0
"""Another machine takes over, starts its servers, and reads the queue."""
_LOOK_AGAIN_S = 0.05
_FOLLOW_S = 0.5


async def wait(
    jobs: Collection[str],
    output_dir: Path,
    form: Form,
    *,
    is_for_running: bool = False,
    timeout_s: float | None = None,
) -> int:
    """Waits for the end of these jobs, or of all, those that come meanwhile too. The exit code: 1 where one of them has
    not finished, or not ended in time. `is_for_running`: until no job runs, and then 0. NoCluster, UnknownJob."""
    folder = ClusterFolder.of(output_dir)
    known = await _listed(folder)
    if unknown := sorted({*jobs}.difference(each.job for each in known)):
        has = ", ".join(sorted(each.job for each in known)) or "none"
        raise UnknownJob(f"the cluster of {output_dir} has no job {', '.join(unknown)}; it has {has}")
    awaited = [each for each in known if _is_awaited(each, is_for_running=is_for_running)]
    seen = {each.job: each for each in awaited if not jobs or each.job in jobs}
    try:
        async with asyncio.timeout(timeout_s):
            ended = await until_ended(folder, jobs, is_for_running=is_for_running, seen=seen)
    except TimeoutError:
        left = sorted(each.job for each in seen.values() if _is_awaited(each, is_for_running=is_for_running))
        print(f"tidegate: after {timeout_s:g} s not ended: {first_few(left, most=8)}", file=sys.stderr)
        return 1
    rows = [row_of(each) for each in ended]
    empty = f"all jobs of the cluster of {output_dir} have ended"
    if is_for_running:
        empty = f"no job runs in the cluster of {output_dir}"
    show(rows, ("job", "state", "starts", "message"), form=form, out=sys.stdout, empty=empty)
    return int(not is_for_running and any(each.end != "finished" for each in ended))


async def pause(reason: str, output_dir: Path, form: Form, *, undo: bool) -> int:
    """Starts no job from now on, or starts them again. NoCluster."""
    async with cluster_of(ClusterFolder.of(output_dir)) as cluster:
        answer = await cluster.PauseQueue(cluster_pb2.PauseQueueRequest(reason=reason, undo=undo))
    told = paused_text(answer.paused, output_dir) if answer.paused else "jobs start again"
    print(answer_text({"paused": answer.paused or None}, told, form))
    return 0


def paused_text(reason: str, output_dir: Path) -> str:
    return f"no job starts until {command_in(output_dir, 'pause', '--undo')}: {reason}"


async def until_ended(
    folder: ClusterFolder,
    jobs: Collection[str],
    *,
    is_for_running: bool = False,
    seen: dict[str, cluster_pb2.Submission] | None = None,
    changed: Callable[[cluster_pb2.Submission], None] = lambda _: None,
) -> list[cluster_pb2.Submission]:
    """These jobs, or all that have not ended or that run, once none is left. Each change is told on stderr and is in
    `seen`; then `changed` is called. NoCluster: the cluster ended, or has forgotten a job."""
    seen, last_told = {} if seen is None else seen, dict[str, str]()
    patience_s = NEXT_KEEPER_S if folder.is_of_several else ANSWER_S
    while True:
        there = await _listed(folder, patience_s=patience_s)
        if gone := sorted({*jobs}.difference(each.job for each in there)):
            raise NoCluster(f"the cluster has ended and forgotten {', '.join(gone)}: the job's folder has its end")
        for each in there:
            is_awaited = _is_awaited(each, is_for_running=is_for_running)
            if each.job in jobs or (not jobs and (each.job in seen or is_awaited)):
                told, seen[each.job] = _told(each), each
                if told != last_told.get(each.job):
                    last_told[each.job] = told
                    print(f"tidegate: job {each.job} {told}", file=sys.stderr)
                    changed(each)
        for job in seen.keys() - {each.job for each in there}:
            seen[job] = cluster_pb2.Submission(job=job, state="ended", message="forgotten: its folder has its end")
        if not any(_is_awaited(each, is_for_running=is_for_running) for each in seen.values()):
            return list(seen.values())
        await asyncio.sleep(_FOLLOW_S)


def _is_awaited(each: cluster_pb2.Submission, *, is_for_running: bool) -> bool:
    return each.state in ("placed", "running") if is_for_running else each.state != "ended"


def _told(each: cluster_pb2.Submission) -> str:
    state = each.end or f"is {each.state}"
    return f"{state}: {each.message}" if each.message or each.end else state


async def submissions(output_dir: Path) -> list[cluster_pb2.Submission]:
    """Those of the cluster of this folder, of one that is down too. One that cannot be asked is told."""
    folder = ClusterFolder.of(output_dir)
    try:
        return await _listed(folder)
    except ClusterDown:
        return kept_submissions(folder)
    except NoCluster as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return []


async def _listed(folder: ClusterFolder, *, patience_s: float = ANSWER_S) -> list[cluster_pb2.Submission]:
    """All jobs. A scheduler that died is there again within seconds: it is asked until then. NoCluster."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            async with cluster_of(folder) as cluster:
                return list((await cluster.ListSubmissions(cluster_pb2.ListSubmissionsRequest())).submissions)
        except PeerUnavailable:
            if time.monotonic() > deadline_s:
                raise
        except NoCluster as error:
            is_between_keepers = patience_s > ANSWER_S and type(error) is not KeptElsewhere
            if not is_between_keepers or time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(_LOOK_AGAIN_S)


async def gpus(output_dir: Path) -> cluster_pb2.ListClusterGpusResponse:
    """Those of the cluster of this folder; none where it is down. One that cannot be asked is told."""
    try:
        async with cluster_of(ClusterFolder.of(output_dir)) as cluster:
            return await cluster.ListClusterGpus(cluster_pb2.ListClusterGpusRequest())
    except ClusterDown:
        pass
    except NoCluster as error:
        print(f"tidegate: {error}", file=sys.stderr)
    return cluster_pb2.ListClusterGpusResponse()


async def cancelled(output_dir: Path, job: str, reason: str) -> cluster_pb2.Submission | None:
    """Cancels a job of the cluster. None: it is not the cluster's, or somebody runs it by hand. NoCluster."""
    folder, own = ClusterFolder.of(output_dir), JobFolder(output_dir / job)
    try:
        if not any(each.job == job and each.state != "ended" for each in await _listed(folder)):
            return None
        async with cluster_of(folder) as cluster:
            request = cluster_pb2.CancelSubmissionRequest(job=job, reason=reason)
            return (await cluster.CancelSubmission(request)).submission
    except ClusterDown:
        kept = word_of(own)
        if kept is None or kept.state == "ended" or launcher_pid(own) is not None:
            return None
        raise


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
