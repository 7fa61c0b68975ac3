"""Virtual time: a queue of actions by their due times.

Invariants:
- Time never runs backwards. [test_clock: time_never_runs_backwards]
- Actions that are due at the same instant run in the order of their scheduling, so that the same calls give the same
  history. [test_clock: the_order_of_their_scheduling]
- A cancelled action never runs. [test_clock: a_cancelled_action]
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


@dataclass(order=True, slots=True)
class Due:
    """A scheduled action. `count` orders the actions of one instant: the number of schedulings before this one."""

    at_s: float
    count: int
    action: Action = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)


class Clock:
    """The clock of one simulation. It starts at `now_s`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._heap: list[Due] = []
        self._count = 0

    def schedule(self, at_s: float, action: Action) -> Due:
        """Run `action` at `at_s`, or now if that is past."""
        due = Due(max(at_s, self.now_s), self._count, action)
        self._count += 1
        heapq.heappush(self._heap, due)
        return due

    def step(self) -> bool:
        """Run the next due action. False: nothing is due."""
        while self._heap:
            due = heapq.heappop(self._heap)
            if not due.is_cancelled:
                self.now_s = due.at_s
                due.action()
                return True
        return False
