"""What a policy remembers of the open iteration: a value in the state, because policies keep nothing themselves.

Invariants:
- an `Assignment` gives a GPU to at most one component, and the trainer as many GPUs as its layout has ranks;
- what was remembered of another iteration, or of another incarnation, counts for nothing (`is_of`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.scheduler.state.layouts import as_engines, engine_size
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Role

EngineGpus = tuple[GpuId, ...]
"""Those of one engine, in rank order."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which GPUs each component should have; those in none are to be free. `trainer` is None while it should have
    none."""

    engines: tuple[EngineGpus, ...]
    trainer: Placed | None
    inference: tuple[GpuId, ...]

    def __post_init__(self) -> None:
        if self.trainer is not None and len(self.trainer.gpus) != self.trainer.layout.num_ranks:
            ranks = self.trainer.layout.num_ranks
            raise ValueError(
                f"trainer on {len(self.trainer.gpus)} GPUs with layout {self.trainer.layout}: it has {ranks} ranks; "
                f"assign {ranks} GPUs or another layout"
            )
        twice = sorted(gpu for gpu, count in Counter(self.gpus).items() if count > 1)
        if twice:
            raise ValueError(f"{len(twice)} GPUs are assigned twice ({', '.join(twice)}); assign each GPU once")

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """All that it assigns: the rollout's, the trainer's, inference's."""
        trainer = self.trainer.gpus if self.trainer else ()
        return (*(gpu for engine in self.engines for gpu in engine), *trainer, *self.inference)

    def __str__(self) -> str:
        rollout = sum(map(len, self.engines))
        trainer = len(self.trainer.gpus) if self.trainer else 0
        return f"rollout {rollout}, actor {trainer}, inference {len(self.inference)} GPUs"


def as_configured(spec: JobSpec) -> Assignment:
    return Assignment(
        engines=as_engines(spec.placement[Role.ROLLOUT].gpus, engine_size(spec)),
        trainer=spec.placement[Role.ACTOR],
        inference=spec.placement[Role.INFERENCE].gpus,
    )


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """GPUs during one minibatch; the engines have the others."""

    num_trainer_gpus: int
    num_inference_gpus: int


@dataclass(frozen=True, slots=True)
class TidePlan:
    """`stages` by minibatch, the last ones of the iteration; what was forecast to start and to end when, and when that
    was. `waits`: before the last minibatch the trainer lends its GPUs to the engines until the rollout is over."""

    starts_at_ms: int
    stages: tuple[PlannedStage, ...]
    ends_at_ms: int
    made_at_ms: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Remembered:
    """`trains`: whether the trainer was last told that it may begin its next minibatch; `is_begun`: the trainer was
    given its GPUs in this iteration; `num_answered`: minibatches after which it was told how to go on; `low_since_ms`:
    since when the rollout's engines are nearly empty; `pending_engines`: how many are to be left once the trainer is
    between two updates; `plan`: how `tide` means to go on; `trained_on`: with how many data-parallel copies the trainer
    was seen since it last had no GPUs, the least first."""

    incarnation: int = 0
    iteration: int | None = None
    assignment: Assignment | None = None
    trains: bool = True
    is_begun: bool = False
    num_answered: int = 0
    num_moves: int = 0
    low_since_ms: int | None = None
    pending_engines: int | None = None
    plan: TidePlan | None = None
    trained_on: tuple[int, ...] = ()

    def is_of(self, incarnation: int, iteration: int) -> bool:
        return self.assignment is not None and (self.incarnation, self.iteration) == (incarnation, iteration)
