"""The result of a simulated iteration, as values for reports and comparisons.

Invariant: a GPU's spans follow one another from the iteration's beginning to its end. No span is empty, and two
neighbours differ. [test_run: a_policy_trains_every_sample_once]
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
class PolicyDecision:
    """A choice that changed the assignment.

    `predicted_end_s` is the policy's forecast of the iteration's end. None: the policy makes no forecast.
    """

    at_s: float
    reason: str
    assignment: Assignment
    predicted_end_s: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run.

    `num_moves` counts changes of the assignment. `num_samples` counts the trained samples. `num_lost` counts those that
    are neither trained nor filtered.
    """

    policy: str
    seed: int
    iteration_s: float
    timeline: Mapping[GpuId, tuple[GpuSpan, ...]]
    decisions: tuple[PolicyDecision, ...]
    history: tuple[Happening, ...]
    bound: Bound
    num_moves: int
    num_samples: int
    num_lost: int


def spans(marks: list[tuple[float, Doing]], end_s: float) -> tuple[GpuSpan, ...]:
    """The spans of a GPU. An activity without duration is left out, and equal neighbours are one span."""
    found: list[GpuSpan] = []
    for (start_s, doing), until_s in zip(marks, [at_s for at_s, _ in marks[1:]] + [end_s], strict=True):
        if until_s <= start_s:
            continue
        if found and found[-1].state is doing:
            found[-1] = replace(found[-1], end_s=until_s)
        else:
            found.append(GpuSpan(start_s, until_s, doing))
    return tuple(found)
