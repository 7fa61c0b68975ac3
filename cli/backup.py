"""`tidegate backup`, `tidegate restore`: the queue of a cluster outlives the loss of its stores (docs/cluster.md)."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cli.cluster_access import cluster_of
from cli.new_file import write_new
from cli.rows import Form, answer_text
from cli.usage import BadUsage
from tidegate.cluster.backup import BackedUpJob, Backup
from tidegate.cluster.drained import drained_by
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.submissions import SubmissionState
from tidegate.json_text import parse_json, typed
from tidegate.ports.rpc import PeerRefused
from tidegate.short_lists import counted
from tidegate.types import Drain, GpuId, node_of
from tidegate.v1 import cluster_pb2, cluster_pb2_grpc


async def back_up(path: Path, output_dir: Path, form: Form) -> int:
    """Writes the cluster's jobs to a new file, which nobody else can read. NoCluster. BadUsage: it cannot be made."""
    async with cluster_of(ClusterFolder.of(output_dir)) as cluster:
        told = [response.job async for response in cluster.BackUpJobs(cluster_pb2.BackUpJobsRequest())]
        there = await cluster.ListClusterGpus(cluster_pb2.ListClusterGpusRequest())
    jobs = tuple(BackedUpJob(each.record.decode(), each.config) for each in told)
    backup = Backup(time.time_ns() // 1_000_000, jobs, drained_by(there.drained_nodes, there.nodes_keeping_jobs))
    # It may have secrets.
    write_new(path, backup.to_json(), mode=0o600)
    num_live = sum(parse_json(each.record)["state"] != SubmissionState.ENDED for each in jobs)
    text = f"{path} has {counted(num_live, 'job')} that wait or run, and {len(jobs) - num_live} that have ended"
    print(answer_text({"file": str(path), "live": num_live, "ended": len(jobs) - num_live}, text, form))
    return 0


def restore(path: Path, output_dir: Path, form: Form) -> int:
    """Puts the jobs of a backup into the queue again, but for those that the cluster has. Exit code 1: some are
    refused. NoCluster. BadUsage: it is no backup."""
    try:
        backup = Backup.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadUsage(f"{path} is no backup that can be restored ({error})") from error
    return asyncio.run(_restore(backup, path, output_dir, form))


async def _restore(backup: Backup, path: Path, output_dir: Path, form: Form) -> int:
    found = Restored()
    async with cluster_of(ClusterFolder.of(output_dir)) as cluster:
        is_new = not (await cluster.ListSubmissions(cluster_pb2.ListSubmissionsRequest())).submissions
        there = await cluster.ListClusterGpus(cluster_pb2.ListClusterGpusRequest())
        nodes = {node_of(GpuId(gpu.gpu)) for gpu in there.gpus}
        for node, drain in sorted(backup.drained.items()):
            if is_new and node in nodes:
                await cluster.DrainNode(cluster_pb2.DrainNodeRequest(node=node, keeps_jobs=drain is Drain.STAY))
                found.drained.append(node)
            elif node not in there.drained_nodes:
                print(f"tidegate: node {node} was drained when the backup was made, and is not now", file=sys.stderr)
        for each in backup.jobs:
            await _restore_job(cluster, each, output_dir, found)
    for told in found.refused:
        print(f"tidegate: {told}", file=sys.stderr)
    print(answer_text({"file": str(path), **asdict(found)}, found.text(path), form))
    return int(bool(found.refused))


@dataclass
class Restored:
    """What became of the jobs of a backup, and of its drained nodes. `ended`: jobs that waited and have to be submitted
    again. `over`: those that had ended before it."""

    queued: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)

    def text(self, path: Path) -> str:
        parts = [f"{counted(len(self.queued), 'job')} of {path} in the queue again"]
        for jobs, what in ((self.known, "the cluster has already"), (self.ended, "ended: submit again")):
            parts += [f"{what}: {', '.join(jobs)}"] if jobs else []
        parts += [f"{counted(len(self.refused), 'job')} refused"] if self.refused else []
        parts += [f"drained: {', '.join(self.drained)}"] if self.drained else []
        return "; ".join(parts)


async def _restore_job(
    cluster: cluster_pb2_grpc.ClusterAsyncStub, each: BackedUpJob, output_dir: Path, found: Restored
) -> None:
    """Notes in `found` what became of it."""
    try:
        record = typed(dict, parse_json(each.record), "a record")
        name, was_over = typed(str, record["job"], "job"), record["state"] == SubmissionState.ENDED
        own = typed(dict, parse_json(each.config), "a config")["output_dir"] if each.config else str(output_dir)
    except (ValueError, KeyError) as error:
        found.refused.append(f"a job of the backup cannot be read ({error})")
        return
    if own != str(output_dir):
        found.refused.append(f"job {name} is of the folder {own}: restore it there, with --output-dir {own}")
        return
    job = cluster_pb2.BackedUpJob(record=each.record.encode(), config=each.config)
    try:
        answer = await cluster.RestoreJob(cluster_pb2.RestoreJobRequest(job=job))
    except PeerRefused as refused:
        found.refused.append(f"job {name}: {refused.reason}")
        return
    if answer.was_known:
        found.known.append(name)
    elif answer.submission.state != SubmissionState.ENDED:
        found.queued.append(name)
    else:
        (found.over if was_over else found.ended).append(name)
