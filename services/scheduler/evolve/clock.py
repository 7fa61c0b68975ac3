"""What a state means for a clock that went back. Pure.

Deadlines are times of the store's clock. If it is set back by an hour, a deadline of two seconds would come an hour
late. So what was noted later than now counts as noted now, and its deadline is as far away as it was then.

A transition's deadline is the store's and stays: a transition that hangs is given up late. Its commands are not.

Invariant: with a clock that does not go back nothing changes. [test_clock: clock_that_goes_on]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.state.cluster_state import ClusterState


def seen_at(state: ClusterState, now_ms: int) -> ClusterState:
    expectations = {
        key: replace(each, issued_ms=now_ms, due_ms=each.due_ms - (each.issued_ms - now_ms))
        for key, each in state.expectations.items()
        if each.issued_ms > now_ms
    }
    absent = {
        gpu: replace(absence, since_ms=None)
        for gpu, absence in state.absent.items()
        if absence.since_ms is not None and absence.since_ms > now_ms
    }
    if not expectations and not absent:
        return state
    ask_at_ms = None if state.ask_at_ms is None else now_ms
    return replace(
        state,
        expectations={**state.expectations, **expectations},
        absent={**state.absent, **absent},
        ask_at_ms=ask_at_ms,
    )
