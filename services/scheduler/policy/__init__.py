"""Where each component should run: the one question that a policy answers. What has to happen for it is `decide`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.state import ClusterState
from services.scheduler.values import Placed
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class Proposal:
    """Each component's GPUs and layout, and why.

    A role that `placement` leaves out stays as it is; one that is None there should have no GPUs. The rollout's GPUs
    are those of its engines, one engine after the other, in a layout whose dp is their number. `trains`: whether the
    actor may begin its next minibatch; `group_order`: in which prompts go to engines, empty leaves it as it is.
    """

    placement: Mapping[Role, Placed | None]
    reason: str
    trains: bool = True
    group_order: tuple[int, ...] = ()


class Policy(Protocol):
    """Pure: the same state and time give the same proposal."""

    def propose(self, state: ClusterState, now_ms: int) -> Proposal: ...
