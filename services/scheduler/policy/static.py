"""`static`: every component is where the config places it, or where a person moved it, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy import Proposal
from services.scheduler.state import ClusterState
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Proposes nothing before the job was submitted. An actor that is up goes where it was asked to; one that is down
    starts where it last was."""

    def propose(self, state: ClusterState, now_ms: int) -> Proposal:
        if state.spec is None:
            return Proposal(placement={}, reason="static: no config yet, so no placement")
        placement = {role: placed for role in Role if (placed := state.home(role)) is not None}
        if state.asked is not None and state.components[Role.ACTOR].is_up:
            placement[Role.ACTOR] = state.asked
        sizes = ", ".join(f"{role} {len(placed.gpus)}" for role, placed in placement.items())
        return Proposal(placement=placement, reason=f"static: GPUs as configured ({sizes})")
