"""What the state remembers of the policy's choices. Policies themselves keep no state.

The scheduler uses the assignment, and whether the trainer may train. A policy remembers more in a value of its own type
(`PolicyMemory`), which only that policy reads. `policy.registry` has the types by name.

Invariants:
- An `Assignment` gives a GPU to at most one component, and the trainer as many GPUs as its layout has ranks.
  [test_situation: an_assignment_gives_a_gpu_once]
- A memory of another iteration, or of another incarnation, does not count.
  [test_situation: counts_in_its_own_iteration]
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

from services.scheduler.state.layouts import Replica, engine_size, replicas
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Role


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which GPUs each component should have. A GPU that no component should have is to be free.

    `trainer` is None if the trainer should have no GPUs.
    """

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
        gpus = self.gpus
        if len(set(gpus)) < len(gpus):
            twice = sorted(gpu for gpu, count in Counter(gpus).items() if count > 1)
            raise ValueError(f"{len(twice)} GPUs are assigned twice ({', '.join(twice)}); assign each GPU once")

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """All assigned GPUs: the rollout's, then the trainer's, then inference's."""
        trainer = self.trainer.gpus if self.trainer else ()
        return (*chain.from_iterable(self.engines), *trainer, *self.inference)

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
    """The base of a policy's own memory of the open iteration. It is frozen, and a codec can write its fields."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The policy's last choice.

    `assignment` is None if the policy chose nothing, or if it remembers no choice. `trains`: the trainer may begin its
    next minibatch. `own` is the memory that the policy alone reads.
    """

    incarnation: int = 0
    iteration: int | None = None
    assignment: Assignment | None = None
    trains: bool = True
    own: PolicyMemory | None = None

    def is_of(self, incarnation: int, iteration: int) -> bool:
        return self.assignment is not None and (self.incarnation, self.iteration) == (incarnation, iteration)
