"""What is remembered of the policy's choices: a value in the state, because policies keep nothing themselves.

The scheduler itself needs the assignment and whether the trainer may train. What a policy remembers besides is a value
of its own type (`PolicyMemory`), which nobody else reads; `policy.registry` has the types by name.

Invariants:
- An `Assignment` gives a GPU to at most one component, and the trainer as many GPUs as its layout has ranks.
  [test_situation: an_assignment_gives_a_gpu_once]
- What is remembered of another iteration, or of another incarnation, counts for nothing.
  [test_situation: counts_in_its_own_iteration]
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.scheduler.state.layouts import Replica, engine_size, replicas
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Role


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which GPUs each component should have; those in none are to be free. `trainer` is None while it should have
    none."""

    engines: tuple[Replica, ...]
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
        engines=replicas(spec.placement[Role.ROLLOUT].gpus, engine_size(spec)),
        trainer=spec.placement[Role.ACTOR],
        inference=spec.placement[Role.INFERENCE].gpus,
    )


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Base of what one policy alone remembers of the open iteration: frozen, and made of values that a codec writes."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """`assignment`: where the policy last put everything; None where it chose nothing, or keeps nothing of its choices.
    `trains`: whether the trainer may begin its next minibatch."""

    incarnation: int = 0
    iteration: int | None = None
    assignment: Assignment | None = None
    trains: bool = True
    own: PolicyMemory | None = None

    def is_of(self, incarnation: int, iteration: int) -> bool:
        return self.assignment is not None and (self.incarnation, self.iteration) == (incarnation, iteration)
