"""Makes the steps of a worker last as long as the pace says: the work is done, and its result waits for the time.

Nothing else in Tidegate waits for time alone. The wait needs no event to end early: a worker whose service is gone ends
itself within it (`die_with_service`), a kill ends it, and an engine waits only as long as its poll may.

Invariants:
- A step ends no sooner than modelled. [test_pacer: ends_no_sooner]
- A step that ends over `TOLERANCE` later than modelled is counted as late. [test_pacer: counted_as_late]
- Without a law nothing waits and nothing is counted. [test_pacer: without_a_law]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.config.sections.job import ClusterSection
from tidegate.pace.law import PaceLaw
from tidegate.pace.steps import CPU_US, LATE_STEPS, STEPS, TOLERANCE

ModelledTime = Callable[[PaceLaw], float]
"""The seconds of a step by the law."""
OnCounts = Callable[[Mapping[str, int]], None]
"""Takes the counts of one step: see `tidegate.pace.steps`."""


@dataclass(slots=True)
class PacedStep:
    """A step that has begun. Its times are of the pacer's clock. `modelled_s` 0: nothing is modelled."""

    started_s: float
    started_cpu_s: float
    modelled_s: float
    is_counted: bool = True
    """False: something else than its work kept it open, such as a pause."""


def uncounted(counts: Mapping[str, int]) -> None:
    """Takes the counts of a pacer that nobody reads."""


class Pacer:
    """The pace of one worker. One thread uses it. Without a law it is transparent."""

    def __init__(
        self,
        law: PaceLaw | None = None,
        *,
        on_counts: OnCounts = uncounted,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._law = law
        self._on_counts = on_counts
        self._clock = clock
        self._sleep = sleep
        self._cpu_clock = cpu_clock

    @classmethod
    def of(cls, cluster: ClusterSection, on_counts: OnCounts) -> Pacer:
        return cls(PaceLaw(cluster.pace) if cluster.pace else None, on_counts=on_counts)

    @contextmanager
    def step(self, modelled: ModelledTime) -> Iterator[None]:
        """The block is one step: the context ends when the step does. A block that raises is not waited for."""
        step = self.begin(modelled)
        yield
        self.end(step)

    def begin(self, modelled: ModelledTime) -> PacedStep:
        """A step begins: call it before the work."""
        if self._law is None:
            return PacedStep(0.0, 0.0, 0.0, is_counted=False)
        return PacedStep(self._clock(), self._cpu_clock(), modelled(self._law))

    def end(self, step: PacedStep, *, by_s: float | None = None) -> bool:
        """Wait for the step's end, at most until `by_s` of the clock. Returns whether the step has ended.

        Do not call it again for a step that has ended."""
        if self._law is None:
            return True
        end_s = step.started_s + step.modelled_s
        until_s = end_s if by_s is None else min(end_s, by_s)
        while (now_s := self._clock()) < until_s:
            self._sleep(until_s - now_s)
        if now_s < end_s:
            return False
        if step.is_counted:
            is_late = now_s - step.started_s > (1 + TOLERANCE) * step.modelled_s
            cpu_us = round((self._cpu_clock() - step.started_cpu_s) * 1e6)
            self._on_counts({STEPS: 1, LATE_STEPS: int(is_late), CPU_US: cpu_us})
        return True
