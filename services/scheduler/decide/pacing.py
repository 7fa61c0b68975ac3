"""Says when the scheduler decides. Pure.

It decides at once after a change of the job's structure, which raises `ClusterState.version`. Progress, backlog and
pictures of an iteration do not raise it. After them it decides at most once in `decide_every_ms`.

Invariants:
- A command's deadline, or the time that a policy asked for, is never delayed. [test_pacing: delays_no_other_decision]
- Progress alone leads to at most one decision in `decide_every_ms`, however often components report.
  [test_pacing: progress_alone_waits]
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.state.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class Pace:
    """`decided_ms` is the time of this replica's last decision; None before the first. `has_news`: a command that it
    issued changed the store, so it decides again at once."""

    decide_every_ms: int
    decided_ms: int | None = None
    has_news: bool = False

    def is_due(self, before: ClusterState, after: ClusterState, now_ms: int) -> bool:
        """Whether to decide on the events between the two states."""
        is_structural = after.version != before.version
        return self.has_news or is_structural or now_ms >= self.next_decision_ms(after, now_ms)

    def next_decision_ms(self, state: ClusterState, now_ms: int) -> int:
        """The time of the next decision if only progress comes before it."""
        if self.has_news or self.decided_ms is None:
            return now_ms
        due_ms, paced_ms = next_due_ms(state), self.decided_ms + self.decide_every_ms
        return paced_ms if due_ms is None else min(due_ms, paced_ms)
