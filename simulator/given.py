"""A plan that was made before, carried out as `tide` carries out its own: what a searched schedule is run by.

Invariant: it is asked what a planner is asked, and answers from the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.scheduler.policy.cluster import Plans
from services.scheduler.policy.foresight import num_to_come
from services.scheduler.policy.plans import Found
from services.scheduler.policy.situation import Situation
from services.scheduler.remembered import Assignment, Remembered
from tidegate.types import GpuId


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the trainer gets its first GPUs; by minibatch, the GPUs that train and infer; the order of prompts at the
    start."""

    start_s: float
    trainer: tuple[int, ...]
    inference: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """A planner without foresight."""

    schedule: Schedule

    def first(self, situation: Situation, assignment: Assignment, there: tuple[GpuId, ...]) -> tuple[int, ...]:
        return self.schedule.order

    def plan(
        self,
        situation: Situation,
        memory: Remembered,
        there: tuple[GpuId, ...],
        *,
        is_move: bool,
        order: tuple[int, ...] = (),
    ) -> Found:
        """Its end is the moment of asking: it foresees none."""
        own, left = self.schedule, num_to_come(situation)
        start_s = max(0.0, own.start_s - situation.now_ms / 1000)
        trainer, inference = own.trainer[len(own.trainer) - left :], own.inference[len(own.inference) - left :]
        return Found(Plans(np.array([start_s]), np.array([trainer]), np.array([inference])), 0.0, 0.0)
