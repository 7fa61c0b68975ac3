"""Pictures of an iteration from the leads of a fake cluster, with so many eighths of it done."""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.state.observed import (
    AWAY,
    ENDED,
    QUEUED,
    Engine,
    Generation,
    Inferring,
    Picture,
    TrainerRate,
    Training,
)
from services.scheduler.state.values import IterationPlan
from tidegate.types import GpuId, Layout, Role

EIGHTHS = 8
MAX_RUNNING = 2
TOKENS = 40
"""The length of a response that has ended."""


def picture(role: Role, plan: IterationPlan, gpus: Sequence[GpuId], *, num_prompts: int, eighths: int) -> Picture:
    match role:
        case Role.ROLLOUT:
            return generation(plan, gpus, num_prompts=num_prompts, eighths=eighths)
        case Role.INFERENCE:
            return Inferring(_ended_groups(plan, num_prompts, eighths), is_busy=eighths < EIGHTHS)
        case Role.ACTOR:
            return training(plan, gpus, num_prompts=num_prompts, eighths=eighths)


def generation(plan: IterationPlan, gpus: Sequence[GpuId], *, num_prompts: int, eighths: int) -> Generation:
    """One engine for each GPU, filled one after the other. Without GPUs all unfinished sequences are away."""
    count = num_prompts * plan.group_size
    num_ended = count * eighths // EIGHTHS
    places = [ENDED] * num_ended
    for index in range(count - num_ended):
        engine = index // MAX_RUNNING
        places.append(AWAY if not gpus else engine if engine < len(gpus) else QUEUED)
    held = [places.count(index) for index in range(len(gpus))]
    return Generation(
        engines=tuple(
            Engine((gpu,), num, 0, num * TOKENS, 1000, MAX_RUNNING, 50.0 * num)
            for gpu, num in zip(gpus, held, strict=True)
        ),
        group_size=plan.group_size,
        lengths=tuple(TOKENS + index if place == ENDED else TOKENS // 2 for index, place in enumerate(places)),
        places=tuple(places),
        queue=tuple(index for index, place in enumerate(places) if place == QUEUED),
    )


def training(plan: IterationPlan, gpus: Sequence[GpuId], *, num_prompts: int, eighths: int) -> Training:
    num_done = plan.num_minibatches * eighths // EIGHTHS
    return Training(
        num_minibatches_done=num_done,
        num_taken=len(_ended_groups(plan, num_prompts, eighths)),
        is_at_boundary=is_between_minibatches(eighths),
        measured=(TrainerRate(Layout(dp=len(gpus)), 100.0 * len(gpus)),) if gpus and num_done else (),
    )


def is_between_minibatches(eighths: int) -> bool:
    return eighths % 2 == 0


def _ended_groups(plan: IterationPlan, num_prompts: int, eighths: int) -> tuple[int, ...]:
    return tuple(range(num_prompts * plan.group_size * eighths // EIGHTHS // plan.group_size))
