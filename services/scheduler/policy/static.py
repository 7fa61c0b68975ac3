"""`static`: every component is at home, where the config, or for the actor a person, placed it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.remembered import as_configured
from services.scheduler.state.values import JobSpec
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    def check(self, spec: JobSpec) -> None:
        """It can run every job."""

    def choose(self, situation: Situation) -> Choice:
        placement = situation.spec.placement
        sizes = ", ".join(f"{role} {len(placement[role].gpus)}" for role in Role)
        return Choice(
            assignment=as_configured(situation.spec),
            trains=True,
            reason=f"static: GPUs as configured ({sizes})",
        )
