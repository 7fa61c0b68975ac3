"""The course of a job as the scheduler knows it: the open iteration, those before it, and where it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.state.events import IterationReported
from services.scheduler.state.values import Fate, IterationPlan, total
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class Steering:
    """What the leads took of how the iteration is to go: whether the actor holds its training, the order of the groups,
    empty as the rollout has it, and how many words of each kind. `asked_order` was asked last, taken or not."""

    is_held: bool = False
    num_holds: int = 0
    group_order: tuple[int, ...] = ()
    asked_order: tuple[int, ...] = ()
    num_orders: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """The iteration that is open. `opened` holds the lead epoch under which each component took it."""

    plan: IterationPlan
    opened: Mapping[Role, int] = field(default_factory=dict)
    reports: Mapping[Role, IterationReported] = field(default_factory=dict)
    closed: tuple[Role, ...] = ()
    is_accounted: bool = False
    steering: Steering = field(default_factory=Steering)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a version came to on prompts that nothing is trained on; `incarnation` is the one that asked them."""

    version: int
    incarnation: int
    num_prompts: int
    samples_per_prompt: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Evaluating:
    """The evaluation that a lead has taken."""

    version: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Summary:
    """An iteration that is over. `is_superseded`: the actor restarted before it, so that it is not in the lineage."""

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


def accounting_fault(summary: Summary) -> str | None:
    """What, the numbers, the remedy; None when the ids add up."""
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
    """`incarnation`: what goes on from it has at least this one. A lead saves in its own; a launcher tells of what it
    found with one that nothing in the job's folder has."""

    next_iteration: int
    version: int
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """The last progress that a component told."""

    incarnation: int
    iteration: int
    phase: str
    num_done: int
    num_total: int
    metrics: tuple[tuple[str, float], ...]
