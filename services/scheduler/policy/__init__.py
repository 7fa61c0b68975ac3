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
    """Each component's GPUs and layout, and why."""

    placement: Mapping[Role, Placed]
    reason: str


class Policy(Protocol):
    """Pure: the same state and time give the same proposal."""

    def propose(self, state: ClusterState, now_ms: int) -> Proposal: ...
