"""Where each component should run: the one question that a policy answers.

A policy sees a `Situation` and answers with a `Choice` (both in `situation`). `decide` asks it, makes a `Proposal` of
its choice, and finds the commands that this needs. `registry` has the policies by name. Of the scheduler's
folders this one imports `state` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Role


@dataclass(frozen=True, slots=True)
class Proposal:
    """Each component's GPUs and layout, and why.

    placement: a role that is missing stays as it is; a role with None should have no GPUs. The rollout's GPUs are those
      of its engines, one engine after the other, in a layout whose dp is their number.
    trains: whether the actor may begin its next minibatch.
    group_order: the order in which prompts go to engines (`tidegate.order_of_responses`); empty leaves it.
    gone: the GPUs that the job goes on without.
    """

    placement: Mapping[Role, Placed | None]
    reason: str
    trains: bool = True
    group_order: tuple[int, ...] = ()
    gone: frozenset[GpuId] = frozenset()


class Policy(Protocol):
    """Pure: the same situation gives the same choice. Its memory is in both."""

    def check(self, spec: JobSpec) -> None:
        """Called before anything starts. ValueError says why the policy cannot run the job, and the remedy."""

    def choose(self, situation: Situation) -> Choice: ...
