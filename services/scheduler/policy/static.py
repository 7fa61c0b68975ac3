"""`static`: every component stays where the config places it, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy import Proposal
from services.scheduler.state import ClusterState
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Proposes the configured placement, and nothing before the job was submitted."""

    def propose(self, state: ClusterState, now_ms: int) -> Proposal:
        if state.spec is None:
            return Proposal(placement={}, reason="static: no config yet, so no placement")
        placement = {role: state.spec.placement[role] for role in Role}
        sizes = ", ".join(f"{role} {len(placed.gpus)}" for role, placed in placement.items())
        return Proposal(placement=placement, reason=f"static: GPUs as configured ({sizes})")
