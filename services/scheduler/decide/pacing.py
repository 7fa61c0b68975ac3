"""When the scheduler decides: at once on what changes the job's structure, and else at most every so often. Pure.

`ClusterState.version` tells the two apart: progress, backlog and pictures of an iteration leave it alone.

Invariants:
- A command's deadline, or the time that a policy named, is never put off. [test_pacing: delays_no_other_decision]
- A policy is asked for progress at most once in `decide_every_ms`, however often components report.
  [test_pacing: progress_alone_waits]
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.state.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class Pace:
    """`decided_ms` is when this replica decided last, None before it has. `has_news`: what it issued changed the store,
    so it decides at once."""

    decide_every_ms: int
    decided_ms: int | None = None
    has_news: bool = False

    def is_due(self, before: ClusterState, after: ClusterState, now_ms: int) -> bool:
        """Whether to decide on what came between the two states."""
        is_structural = after.version != before.version
        return self.has_news or is_structural or now_ms >= self.next_decision_ms(after, now_ms)

    def next_decision_ms(self, state: ClusterState, now_ms: int) -> int:
        """When to decide next, should nothing but progress come."""
        if self.has_news or self.decided_ms is None:
            return now_ms
        due_ms, paced_ms = next_due_ms(state), self.decided_ms + self.decide_every_ms
        return paced_ms if due_ms is None else min(due_ms, paced_ms)
