"""`static`, colocated: one phase after the other, each on all of the job's GPUs. Pure.

All generate until the last sequence has ended, then all infer until the last group has its log-probabilities, then all
train: the schedule that RLinf, verl and others call collocated, and that published timelines call static. Then each
component is where it is placed, for an evaluation needs the rollout.
Invariant: three placements an iteration and home, whatever happens in it; GPUs that make no whole engine, or no whole
data-parallel copy, stay with nobody in that phase.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.layouts import as_engines, engine_size, most_copies, placed_gpus
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class PhasesPolicy:
    def check(self, spec: JobSpec) -> None:
        """Every job that is placed will do."""

    def choose(self, situation: Situation) -> Choice:
        spec = situation.spec
        if situation.trainer.training.num_minibatches_done == spec.num_minibatches:
            told, at = "all minibatches are done, everything where it is placed", as_configured(spec)
        elif situation.num_unfinished:
            told = f"{situation.num_unfinished} sequences are unfinished"
            at = Assignment(as_engines(placed_gpus(spec), engine_size(spec)), trainer=None, inference=())
        elif not situation.is_inferred:
            told = (
                f"{len(situation.inference.inferring.ready)} of {situation.generation.num_groups} groups are inferred"
            )
            whole = _largest(spec, Role.INFERENCE)
            at = Assignment((), trainer=None, inference=whole.gpus if whole else ())
        else:
            told = "all groups are inferred"
            # Each of its copies has a sequence of every minibatch.
            trainer = _largest(spec, Role.ACTOR, most=spec.num_samples_per_minibatch)
            at = Assignment((), trainer=trainer, inference=())
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


def _largest(spec: JobSpec, role: Role, *, most: int | None = None) -> Placed | None:
    """As many whole copies of the component as all GPUs make, and at most so many."""
    num_shards = spec.num_logical_shards if role is Role.ACTOR else None
    return most_copies(spec.placement[role].layout, placed_gpus(spec), most=most, num_shards=num_shards)
