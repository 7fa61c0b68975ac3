"""`static`: every component is at home, where the config, or for the actor a person, placed it. Pure.

The only other choice is the order of prompts (`opening_order`), which moves no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy.opening_order import opening_order
from services.scheduler.policy.situation import Choice, Situation
from services.scheduler.state.remembered import as_configured
from services.scheduler.state.values import JobSpec
from tidegate.types import PromptOrder, Role


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    order: PromptOrder = PromptOrder.AS_GIVEN

    def check(self, spec: JobSpec) -> None:
        """It can run every job."""

    def choose(self, situation: Situation) -> Choice:
        placement = situation.spec.placement
        sizes = ", ".join(f"{role} {len(placement[role].gpus)}" for role in Role)
        return Choice(
            assignment=as_configured(situation.spec),
            trains=True,
            reason=f"static: GPUs as configured ({sizes})",
            group_order=opening_order(situation, self.order),
        )
