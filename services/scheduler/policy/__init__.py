"""Where each component should run: the one question that a policy answers. It sees a `Situation` and answers with a
`Choice` (`situation`); `proposing` asks it and makes a `Proposal` of its choice; what has to happen for that is
`decide`'s. `registry` has the policies by name."""

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

    A role that `placement` leaves out stays as it is; one that is None there should have no GPUs. The rollout's GPUs
    are those of its engines, one engine after the other, in a layout whose dp is their number. `trains`: whether the
    actor may begin its next minibatch; `group_order`: in which prompts go to engines, empty leaves it as it is; `gone`:
    the GPUs that the job goes on without.
    """

    placement: Mapping[Role, Placed | None]
    reason: str
    trains: bool = True
    group_order: tuple[int, ...] = ()
    gone: frozenset[GpuId] = frozenset()


class Policy(Protocol):
    """Pure: the same situation gives the same choice; what it remembers is in both."""

    def check(self, spec: JobSpec) -> None:
        """ValueError says why it cannot run the job, and what to change; asked before anything starts."""

    def choose(self, situation: Situation) -> Choice: ...
