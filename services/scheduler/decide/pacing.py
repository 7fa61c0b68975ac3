"""When the scheduler decides: at once on what changes the job's structure, and else at most every so often. Pure.

Progress, backlog and pictures of an iteration leave `ClusterState.version` alone, so that it tells the two apart.

Invariants:
- what is due, a command's deadline or the time that a policy named, is never put off;
- however often components tell of progress, a policy is asked at most once in `decide_every_ms` for it.
"""

from __future__ import annotations

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.state.cluster_state import ClusterState


def next_decision_ms(state: ClusterState, *, decided_ms: int, decide_every_ms: int) -> int:
    """When to decide next, should nothing but progress come; `decided_ms` is when the last decision was."""
    due_ms, paced_ms = next_due_ms(state), decided_ms + decide_every_ms
    return paced_ms if due_ms is None else min(due_ms, paced_ms)


def is_structural(before: ClusterState, after: ClusterState) -> bool:
    """Whether what came in between is decided on at once."""
    return after.version != before.version
