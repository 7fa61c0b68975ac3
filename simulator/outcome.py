"""What came of a simulated iteration, as values that whoever shows or compares runs reads.

Invariant: a GPU's spans follow one another from 0 to the iteration's end, none of no length, no two neighbours alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.scheduler.state.remembered import Assignment
from simulator.bound import Bound
from simulator.gpus import Doing
from simulator.happenings import Happening
from tidegate.types import GpuId


@dataclass(frozen=True, slots=True)
class GpuSpan:
    start_s: float
    end_s: float
    state: Doing


@dataclass(frozen=True, slots=True)
class Decided:
    """A choice that changed the assignment. `predicted_end_s` is the iteration's end as the policy foresaw it, None
    where it foresees none."""

    at_s: float
    reason: str
    assignment: Assignment
    predicted_end_s: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """`num_samples` are those that optimizer steps trained, `num_lost` those that were to be and were not; `num_moves`
    counts changes of the assignment."""

    policy: str
    seed: int
    iteration_s: float
    timeline: Mapping[GpuId, tuple[GpuSpan, ...]]
    decisions: tuple[Decided, ...]
    history: tuple[Happening, ...]
    bound: Bound
    num_moves: int
    num_samples: int
    num_lost: int


def spans(marks: list[tuple[float, Doing]], end_s: float) -> tuple[GpuSpan, ...]:
    """What took no time is left out, and what goes on is one span."""
    found: list[GpuSpan] = []
    for (start_s, doing), until_s in zip(marks, [at_s for at_s, _ in marks[1:]] + [end_s], strict=True):
        if until_s <= start_s:
            continue
        if found and found[-1].state is doing:
            found[-1] = replace(found[-1], end_s=until_s)
        else:
            found.append(GpuSpan(start_s, until_s, doing))
    return tuple(found)
