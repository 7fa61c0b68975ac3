"""The course of a job: the open iteration, earlier iterations, evaluations, and the checkpoint to continue from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from services.scheduler.state.events import IterationReported
from services.scheduler.state.values import Fate, IterationPlan, total
from tidegate.types import Role

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Steering:
    """The steering commands that the leads accepted in the open iteration.

    - `is_held`: the actor begins no further minibatch.
    - `group_order`: the order of the groups, one of which may be there twice. Empty: the rollout's own order.
    - `num_holds`, `num_orders`: how many commands of each kind the leads accepted.
    - `asked_order`: the order in the last command that was sent, accepted or not.
    """

    is_held: bool = False
    num_holds: int = 0
    group_order: tuple[int, ...] = ()
    asked_order: tuple[int, ...] = ()
    num_orders: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """The open iteration. `opened` has the lead epoch under which each component accepted it."""

    plan: IterationPlan
    opened: Mapping[Role, int] = field(default_factory=dict)
    reports: Mapping[Role, IterationReported] = field(default_factory=dict)
    closed: tuple[Role, ...] = ()
    is_accounted: bool = False
    steering: Steering = field(default_factory=Steering)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of a version on prompts that are not trained on. `incarnation` is the incarnation that ran them."""

    version: int
    incarnation: int
    num_prompts: int
    samples_per_prompt: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class AcceptedEvaluation:
    """An evaluation that a lead accepted, whether it is over or not. `epoch` is that of the lead."""

    version: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Summary:
    """An iteration that is over.

    `is_superseded`: the actor restarted from a checkpoint before this iteration, so it is not in the lineage.
    """

    iteration: int
    incarnation: int
    version: int
    generated: Fate
    trained: Fate
    filtered: tuple[Fate, ...]
    discarded: tuple[Fate, ...]
    metrics: tuple[tuple[str, float], ...]
    is_superseded: bool = False

    @property
    def num_accounted(self) -> int:
        return total((self.trained, *self.filtered, *self.discarded)).num_samples

    @property
    def num_lost(self) -> int:
        return max(0, self.generated.num_samples - self.num_accounted)

    @property
    def num_duplicates(self) -> int:
        return max(0, self.num_accounted - self.generated.num_samples)


KEPT = 16
"""How many accounts, and how many evaluations, a state keeps. The job's events have all of them."""


def newest(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows that a state keeps of these, the oldest first."""
    return rows[-KEPT:]


def accounting_fault(summary: Summary) -> str | None:
    """A message with the numbers and the remedy. None if the samples' ids add up."""
    accounted = total((summary.trained, *summary.filtered, *summary.discarded))
    generated = summary.generated
    if (accounted.num_samples, accounted.ids_digest) == (generated.num_samples, generated.ids_digest):
        return None
    sums = (
        f"generated {generated.num_samples}, trained {summary.trained.num_samples} + filtered "
        f"{total(summary.filtered).num_samples} + discarded {total(summary.discarded).num_samples} = "
        f"{accounted.num_samples}"
    )
    if accounted.num_samples == generated.num_samples:
        what = "the numbers agree but the ids do not, so at least one sample was lost and another counted twice"
    else:
        what = f"{summary.num_lost} lost, {summary.num_duplicates} counted twice"
    return (
        f"samples of iteration {summary.iteration} do not add up: {sums} ({what}; digests {generated.ids_digest:016x} "
        f"and {accounted.ids_digest:016x}); resume from the last checkpoint"
    )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`incarnation`: an incarnation that continues from this checkpoint has at least this number.

    A lead saves with its own incarnation. A launcher reports a checkpoint that it found with an incarnation that
    nothing in the job's folder has.

    `known_until`: of one that an incarnation wrote of which the state knows nothing, because it came back older.
    Earlier iterations are in both lineages. Whether a later one was trained again is not known.
    """

    next_iteration: int
    version: int
    name: str
    incarnation: int
    known_until: int | None = None


@dataclass(frozen=True, slots=True)
class ComponentProgress:
    """The last progress that a component reported."""

    incarnation: int
    iteration: int
    phase: str
    num_done: int
    num_total: int
    metrics: tuple[tuple[str, float], ...]
