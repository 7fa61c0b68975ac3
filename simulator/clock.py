"""Virtual time: what is due next.

Invariants: time never runs backwards; what is due at the same instant comes in the order in which it was scheduled, so
that the same calls give the same history; what was cancelled never comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


@dataclass(order=True, slots=True)
class Due:
    """Something scheduled; its place among what is due at the same instant is the count of schedulings before it."""

    at_s: float
    count: int
    action: Action = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)


class Clock:
    """Starts at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[Due] = []
        self._count = 0

    def schedule(self, at_s: float, action: Action) -> Due:
        """`action` at `at_s`, or now where that is past."""
        due = Due(max(at_s, self.now_s), self._count, action)
        self._count += 1
        heapq.heappush(self._heap, due)
        return due

    def step(self) -> bool:
        """Does what is due next; False when nothing is."""
        while self._heap:
            due = heapq.heappop(self._heap)
            if not due.is_cancelled:
                self.now_s = due.at_s
                due.action()
                return True
        return False
