"""`static`, collocated: one phase after the other, each on all GPUs of the job. Pure.

1. All GPUs generate until the last sequence has ended, in the order of prompts that the rule `order` names.
2. All infer until the last group has its log-probabilities.
3. All train.
4. Each component goes home, because an evaluation needs the rollout.

RLinf, verl and others call this schedule collocated; published timelines call it static. GPUs that make no
whole engine, or no whole data-parallel copy, have no owner in that phase.

Invariant: an iteration has three placements and home, whatever happens in it.
[test_phases_policy: three_placements_and_home]
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy.actor_layouts import actor_layouts
from services.scheduler.policy.opening_order import opening_order
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.layouts import engine_size, most_copies, placed_gpus, replicas
from services.scheduler.state.remembered import Assignment, PolicyMemory, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import PromptOrder, Role


@dataclass(frozen=True, slots=True)
class PhasesMemory(PolicyMemory):
    """Empty: the assignment is all that it needs."""


@dataclass(frozen=True, slots=True)
class PhasesPolicy:
    order: PromptOrder = PromptOrder.AS_GIVEN

    def check(self, spec: JobSpec) -> None:
        """It can run every job."""

    def choose(self, situation: Situation) -> Choice:
        spec = situation.spec
        if situation.trainer.training.num_minibatches_done == spec.num_minibatches:
            why, at = "all minibatches are done: every component is where it is placed", as_configured(spec)
        elif situation.num_unfinished:
            why = f"{situation.num_unfinished} sequences are unfinished"
            at = Assignment(replicas(placed_gpus(spec), engine_size(spec)), trainer=None, inference=())
        elif not situation.is_inferred:
            why = f"{len(situation.inference.inferring.ready)} of {situation.generation.num_groups} groups are inferred"
            whole = most_copies(spec.placement[Role.INFERENCE].layout, placed_gpus(spec))
            at = Assignment((), trainer=None, inference=whole.gpus if whole else ())
        else:
            why = "all groups are inferred"
            at = Assignment((), trainer=whole_trainer(situation), inference=())
        reason = f"static, collocated: {why}; {at}"
        return Choice(
            at,
            trains=at.trainer is not None,
            reason=reason,
            memory=PhasesMemory(),
            group_order=opening_order(situation, self.order),
        )


def whole_trainer(situation: Situation) -> Placed | None:
    """The fastest layout on all GPUs. A trainer that has GPUs keeps its kind of copies: a measurement moves no GPU."""
    spec, placed = situation.spec, situation.trainer.placed
    # At most one copy a sequence: a copy without a sequence could not train.
    layouts = actor_layouts(situation, len(gpus := placed_gpus(spec)), most_copies=spec.num_samples_per_minibatch)
    kept = layouts.most_like(placed.layout, gpus) if placed else None
    return kept or layouts.placed(gpus)
