"""`static`: every component is where the config places it, or where a person moved it, whatever happens. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.remembered import as_configured
from services.scheduler.state.values import JobSpec
from tidegate.types import Role


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Remembers nothing."""

    def check(self, spec: JobSpec) -> None:
        """Every job that is placed will do."""

    def choose(self, situation: Situation) -> Choice:
        placement = situation.spec.placement
        sizes = ", ".join(f"{role} {len(placement[role].gpus)}" for role in Role)
        return Choice(
            assignment=as_configured(situation.spec),
            trains=True,
            remembered=situation.remembered,
            reason=f"static: GPUs as configured ({sizes})",
        )
