"""What the files of a cluster's queue say: of a cluster that is down, and of jobs whose own folders say less.

Invariant: a job of a cluster that was interrupted is as the queue says, and not as its interrupted run.
[test_cluster_queue: that_is_down_is_told]
"""

from __future__ import annotations

import sys
from contextlib import suppress

from cli.cluster_access import NoCluster, agent_pid, keeper_elsewhere
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.kept_queue import KeptQueue
from tidegate.cluster.submission_codec import encode_submission
from tidegate.cluster.submissions import Submission, SubmissionState
from tidegate.job import JobFolder
from tidegate.v1 import cluster_pb2

DOWN = "the cluster is down: tidegate up goes on with it"
_STANDS_BY = "no machine keeps the cluster now: one that stands by goes on with it"


def kept_submissions(folder: ClusterFolder) -> list[cluster_pb2.Submission]:
    """All jobs. Files that cannot be read are told."""
    try:
        kept = KeptQueue(folder.queue).read()
    except OSError as error:
        print(f"tidegate: the queue of {folder.root.parent} cannot be read: {error}", file=sys.stderr)
        return []
    for fault in kept.faults:
        print(f"tidegate: {fault}", file=sys.stderr)
    found = [Submission.parse(each.record) for each in kept.jobs.values()]
    return [encode_submission(each, message=_message(each, folder)) for each in found]


def word_of(job: JobFolder) -> cluster_pb2.Submission | None:
    """What the queue has of a job. None: nothing, or an end that is older than a run by hand."""
    folder = ClusterFolder.of(job.root.parent)
    with suppress(OSError, ValueError):
        record = folder.queue / "records" / f"{job.root.name}.json"
        each = Submission.parse(record.read_bytes())
        is_over = each.state is SubmissionState.ENDED and job.result.exists()
        if is_over and record.stat().st_mtime_ns < job.result.stat().st_mtime_ns:
            return None
        return encode_submission(each, message=_message(each, folder))
    return None


def _message(each: Submission, folder: ClusterFolder) -> str:
    if each.state is SubmissionState.ENDED:
        return each.message
    with suppress(NoCluster):
        if agent_pid(folder) is None and keeper_elsewhere(folder) is None:
            return _STANDS_BY if folder.is_of_several else DOWN
    return each.message
