"""`static`, colocated: one phase after the other, each on all of the job's GPUs. Pure.

All generate until the last sequence has ended, then all infer until the last group has its log-probabilities, then all
train: the schedule that RLinf, verl and others call collocated, and that published timelines call static.
Invariant: three placements an iteration, whatever happens in it; GPUs that make no whole engine, or no whole
data-parallel copy, stay with nobody in that phase.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy.situation import (
    Choice,
    Situation,
    as_engines,
    engine_size,
    placed_gpus,
    replica_size,
    with_dp,
)
from services.scheduler.remembered import Assignment, Remembered
from services.scheduler.values import JobSpec, Placed
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class PhasesPolicy:
    def check(self, spec: JobSpec) -> None:
        """Every job that is placed will do."""

    def choose(self, situation: Situation) -> Choice:
        spec = situation.spec
        gpus = placed_gpus(spec)
        if situation.num_unfinished:
            told = f"{situation.num_unfinished} sequences are unfinished"
            at = Assignment(as_engines(gpus, engine_size(spec)), trainer=None, inference=())
        elif not situation.is_inferred:
            told = (
                f"{len(situation.inference.inferring.ready)} of {situation.generation.num_groups} groups are inferred"
            )
            at = Assignment((), trainer=None, inference=gpus)
        else:
            told = "all groups are inferred"
            at = Assignment((), trainer=_largest_trainer(spec), inference=())
        remembered = situation.remembered
        if not remembered.is_of(situation.incarnation, situation.iteration):
            remembered = Remembered(incarnation=situation.incarnation, iteration=situation.iteration)
        moved = Remembered(
            incarnation=situation.incarnation,
            iteration=situation.iteration,
            assignment=at,
            is_begun=at.trainer is not None,
            num_moves=remembered.num_moves + (remembered.assignment not in (None, at)),
        )
        return Choice(at, trains=at.trainer is not None, remembered=moved, reason=f"static, collocated: {told}; {at}")


def _largest_trainer(spec: JobSpec) -> Placed | None:
    """Each of its copies has a sequence of every minibatch."""
    gpus, home = placed_gpus(spec), spec.placement[Role.ACTOR].layout
    size = replica_size(home)
    for copies in range(min(len(gpus) // size, spec.num_samples_per_minibatch), 0, -1):
        if layout := with_dp(home, copies):
            return Placed(gpus[: copies * size], layout)
    return None
