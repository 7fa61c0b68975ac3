"""A submission as the wire has it, for people."""

from __future__ import annotations

from tidegate.cluster.submissions import Submission
from tidegate.v1 import cluster_pb2


def encode_submission(each: Submission, *, message: str) -> cluster_pb2.Submission:
    return cluster_pb2.Submission(
        job=each.job,
        state=each.state,
        priority=each.priority,
        submitted_unix_ms=each.submitted_unix_ms,
        gpus=each.gpus,
        num_starts=each.starts,
        is_cancelled=each.is_cancelled,
        end=each.end,
        message=message,
        num_gpus=each.num_gpus,
        node_bytes=each.node_bytes,
    )
