"""What one slot did and when, as spans of its node's monotonic clock in integer nanoseconds.

Invariants:
- Spans are contiguous: each starts where the one before ended, the first where the clock was made. So their lengths add
  up exactly to the time between the first start and the last end. [test_slot_clock: time_without_a_gap]
- No span is empty. [test_slot_clock: entered_again_stays_one_span]
- A count is in exactly one span. [test_slot_clock: counts_are_in_the_span]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class SlotState(StrEnum):
    """What a worker does. A waiting worker's state is `waiting_for(what)`."""

    STARTING = "starting"
    TRAINING = "training"
    GENERATING = "generating"
    COMPUTING_LOG_PROBS = "computing_log_probs"
    LOADING_WEIGHTS = "loading_weights"
    PUBLISHING = "publishing"
    SAVING = "saving"
    DRAINING = "draining"
    BUILDING = "building"
    TRANSFERRING = "transferring"
    SWITCHING = "switching"


def waiting_for(what: str) -> str:
    """The state of a slot that cannot go on before `what` is there: "prompts", "samples", "minibatch"."""
    return f"waiting_{what}"


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """The slot was in `state` from `start_ns` up to, not including, `end_ns`."""

    state: str
    start_ns: int
    end_ns: int
    work: tuple[tuple[str, int], ...] = ()
    """What the slot worked on, by name: see `call_work`."""


class SlotClock:
    """The present state of this slot, and the spans that `take` has not returned yet. One thread uses it."""

    def __init__(self, now_ns: Callable[[], int], state: str = SlotState.STARTING) -> None:
        self._now_ns = now_ns
        self._state = state
        self._work: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._start_ns = now_ns()
        self._finished: list[SlotSpan] = []

    @property
    def state(self) -> str:
        return self._state

    def enter(self, state: str, work: Mapping[str, int] = MappingProxyType({})) -> None:
        """The slot is in `state` from now on, at this work. Does nothing when it is already."""
        if (state, dict(work)) != (self._state, self._work):
            self._cut()
            self._state, self._work = state, dict(work)

    def go_over(self, state: str) -> None:
        """The slot is in `state` from now on, at the same work."""
        self.enter(state, self._work)

    @contextmanager
    def during(self, state: str, work: Mapping[str, int] = MappingProxyType({})) -> Iterator[None]:
        """The slot is in `state` within the block, and afterwards in its former state."""
        before, work_before = self._state, self._work
        self.enter(state, work)
        try:
            yield
        finally:
            self.enter(before, work_before)

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to the counts of the present span. Its work has them, by name."""
        for name, number in counts.items():
            self._counts[name] = self._counts.get(name, 0) + number

    def take(self, *, num_tokens: int = 0) -> list[SlotSpan]:
        """All spans up to now, each once. The state continues in a new span. The last one ends with `num_tokens`."""
        self._cut({"tokens": num_tokens} if num_tokens else {})
        taken, self._finished = self._finished, []
        return taken

    def _cut(self, done: Mapping[str, int] = MappingProxyType({})) -> None:
        end_ns = self._now_ns()
        if end_ns > self._start_ns:
            work = {**self._work, **done, **self._counts}
            self._finished.append(SlotSpan(self._state, self._start_ns, end_ns, tuple(work.items())))
            self._start_ns, self._counts = end_ns, {}
