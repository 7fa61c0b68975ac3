"""`tide`'s foresight, but that the last minibatch waits for the rollout whenever it can."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from services.scheduler.policy.foresight import Foresight, TideRules, num_to_come
from services.scheduler.policy.plans import Found
from services.scheduler.policy.situation import Situation
from services.scheduler.remembered import Assignment, Remembered
from tidegate.types import GpuId

FAR_S = 1e4
"""Beyond any iteration: the rollout's end has to end the wait."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A planner."""

    own: Foresight = field(default_factory=lambda: Foresight(TideRules()))

    def first(self, situation: Situation, assignment: Assignment, there: tuple[GpuId, ...]) -> tuple[int, ...]:
        return self.own.first(situation, assignment, there)

    def plan(
        self,
        situation: Situation,
        memory: Remembered,
        there: tuple[GpuId, ...],
        *,
        is_move: bool,
        order: tuple[int, ...] = (),
    ) -> Found:
        found = self.own.plan(situation, memory, there, is_move=is_move, order=order)
        waits_now = is_move and memory.is_begun and num_to_come(situation) == 1
        start_s = np.array([FAR_S]) if waits_now else found.plan.start_s
        return replace(found, plan=replace(found.plan, waits=True, start_s=start_s))

    def kept(
        self,
        situation: Situation,
        home: Assignment,
        there: tuple[GpuId, ...],
        lent: Found,
        *,
        order: tuple[int, ...] = (),
    ) -> None:
        """Opens with every GPU in the rollout."""
