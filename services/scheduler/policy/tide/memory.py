"""The memory of `tide` in the open iteration."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.state.remembered import PolicyMemory


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """GPUs during one minibatch; the engines have the others."""

    num_trainer_gpus: int
    num_inference_gpus: int


@dataclass(frozen=True, slots=True)
class TidePlan:
    """A plan of the remaining iteration.

    starts_at_ms, ends_at_ms: the trainer's start and the iteration's end, as forecast at `made_at_ms`.
    stages: by minibatch, the last ones of the iteration.
    infers_at_ms: when inference gets its GPUs, ahead of the trainer. None: with it.
    """

    starts_at_ms: int
    stages: tuple[PlannedStage, ...]
    ends_at_ms: int
    made_at_ms: int
    infers_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TideMemory(PolicyMemory):
    """is_begun: the trainer has got its GPUs in this iteration.
    num_answered: the number of minibatches that have got their GPUs.
    plan: how to go on.
    ordered_at_ms: when the order of prompts was last chosen, be it to leave them as they are. None: not yet.
    """

    is_begun: bool = False
    num_answered: int = 0
    plan: TidePlan | None = None
    ordered_at_ms: int | None = None
