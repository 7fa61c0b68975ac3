"""What a policy looks at when it chooses, and what it answers: frozen values, checked when made.

Invariants of a `Situation`, besides those of the pictures (`observed`):
- No GPU is in two places: an engine, the trainer, inference, free, moving.
- All engines have the same size.
- A group that inference handed on has no unfinished sequence, and the trainer took at most the groups that were handed
  on.
- At most `num_minibatches` are done, and a trainer without GPUs is between two updates.
[test_situation: that_contradicts_itself_is_refused]

Counts are exact. Rates and costs are measurements of this or earlier iterations, and never zero where a formula divides
by them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from services.scheduler.policy.lengths_law import final_lengths
from services.scheduler.policy.supported_law import supported_law
from services.scheduler.state.costs import Costs, LengthLaw
from services.scheduler.state.layouts import engine_size
from services.scheduler.state.observed import Engine, Floats, Generation, Inferring, Ints, Training
from services.scheduler.state.remembered import Assignment, PolicyMemory, Remembered
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId

Memory = TypeVar("Memory", bound=PolicyMemory)


@dataclass(frozen=True, slots=True)
class Trainer:
    """The actor. `placed` is None while it has no GPUs."""

    placed: Placed | None
    training: Training

    @property
    def num_gpus(self) -> int:
        return len(self.placed.gpus) if self.placed else 0


@dataclass(frozen=True, slots=True)
class Inference:
    """Its backlog is the groups whose sequences have all ended and that it has not handed on.
    `measured_tokens_per_s_per_gpu` is None while only the spec's rates are known."""

    gpus: tuple[GpuId, ...]
    measured_tokens_per_s_per_gpu: float | None
    inferring: Inferring


@dataclass(frozen=True)
class Situation:
    """`moving`: GPUs in an open transition. No component works on them."""

    now_ms: int
    incarnation: int
    iteration: int
    spec: JobSpec
    generation: Generation
    inference: Inference
    trainer: Trainer
    free: tuple[GpuId, ...]
    moving: tuple[GpuId, ...]
    costs: Costs
    lengths: LengthLaw
    remembered: Remembered

    def __post_init__(self) -> None:
        for problem in (*_placing(self), *_rates(self), *_counting(self)):
            raise ValueError(f"situation of iteration {self.iteration}: {problem}")

    def recalled(self, kind: type[Memory]) -> tuple[Assignment, Memory] | None:
        """What the policy with this memory assigned in the open iteration, and its memory; None before it chose."""
        remembered = self.remembered
        own, is_of = remembered.own, remembered.is_of(self.incarnation, self.iteration)
        if not is_of or remembered.assignment is None or not isinstance(own, kind):
            return None
        return remembered.assignment, own

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.generation.engines

    @property
    def num_submitted(self) -> int:
        return self.generation.num_submitted

    @property
    def num_unfinished(self) -> int:
        return self.generation.num_unfinished

    @property
    def num_sequences(self) -> int:
        return len(self.generation.lengths)

    @cached_property
    def law_in_force(self) -> LengthLaw:
        """The law of lengths that the iteration supports: as told, or another."""
        return supported_law(self.generation, self.lengths)

    @cached_property
    def expected_lengths(self) -> Floats:
        """By sequence: the tokens that it is expected to end with, under the law in force. Kept, because a decision may
        search twice."""
        return final_lengths(self.generation, self.law_in_force)

    @property
    def inference_tokens_per_s_per_gpu(self) -> float:
        """The measured rate, else the spec's."""
        measured = self.inference.measured_tokens_per_s_per_gpu
        return self.spec.rates.inference_tokens_per_s_per_gpu if measured is None else measured

    @property
    def is_inferred(self) -> bool:
        """Whether inference has no work left in this iteration."""
        return len(self.inference.inferring.ready) == self.generation.num_groups


def _placing(situation: Situation) -> tuple[str, ...]:
    trainer, engine_gpus = situation.trainer, [gpu for engine in situation.engines for gpu in engine.gpus]
    trainer_gpus = trainer.placed.gpus if trainer.placed else ()
    gpus = (*engine_gpus, *trainer_gpus, *situation.inference.gpus, *situation.free, *situation.moving)
    twice = sorted(gpu for gpu, count in Counter(gpus).items() if count > 1)
    problems = [f"{', '.join(twice)} in two places; each GPU has one"] if twice else []
    size = engine_size(situation.spec)
    odd = sum(len(engine.gpus) != size for engine in situation.engines)
    if odd:
        problems.append(f"{odd} of {len(situation.engines)} engines have not {size} GPUs, as the rollout's layout says")
    if trainer.placed and len(trainer.placed.gpus) != trainer.placed.layout.num_ranks:
        problems.append(f"the trainer has {len(trainer_gpus)} GPUs, its layout {trainer.placed.layout.num_ranks} ranks")
    return tuple(problems)


def _rates(situation: Situation) -> tuple[str, ...]:
    rates = {
        "inference's rate": situation.inference_tokens_per_s_per_gpu,
        "sigma_prompt": situation.lengths.sigma_prompt,
        "sigma_group": situation.lengths.sigma_group,
        "sigma_hint": situation.lengths.sigma_hint,
        "the prefill rate": situation.costs.prefill_tokens_per_s,
        "the decode step's floor": situation.costs.decode.floor_s,
    }
    times = {each.name: getattr(situation.costs, each.name) for each in fields(Costs) if each.name.endswith("_s")}
    return (
        *(f"{name} is {value}, it must be above 0" for name, value in rates.items() if not value > 0),
        *(f"{name}={value} is a time, it must be at least 0" for name, value in times.items() if not value >= 0),
    )


def _counting(situation: Situation) -> tuple[str, ...]:
    training, ready = situation.trainer.training, situation.inference.inferring.ready
    unfinished = situation.generation.unfinished_by_group
    num_groups, spec = situation.generation.num_groups, situation.spec
    problems = []
    if situation.generation.group_size != spec.group_size or num_groups < spec.num_prompts:
        groups = f"{num_groups} groups of {situation.generation.group_size}"
        problems.append(f"{groups}; the job has at least {spec.num_prompts} of {spec.group_size}")
    if not 0 <= training.num_minibatches_done <= spec.num_minibatches:
        problems.append(f"{training.num_minibatches_done} minibatches are done, it has {spec.num_minibatches}")
    if situation.trainer.placed is None and not training.is_at_boundary:
        problems.append("a minibatch is begun and the trainer has no GPUs; what was not updated is dropped first")
    if any(group >= num_groups or unfinished[group] for group in ready):
        problems.append("inference handed a group on that is still generated, or none of the iteration's")
    if not 0 <= training.num_taken <= len(ready):
        problems.append(f"the trainer took {training.num_taken} groups of {len(ready)} that are ready")
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a policy weighed, for people to read. `end_s`: seconds until the forecast end of the iteration."""

    what: str
    end_s: float
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer.

    trains: whether the trainer may begin its next minibatch.
    memory: the policy finds it, with the assignment, in the next situation; None keeps neither.
    group_order: the order in which prompts go to engines, those that an engine hands back included
      (`tidegate.order_of_responses`); empty leaves it.
    ask_at_ms: when the policy wants to be asked again if nothing happens before.
    ends_at_ms: when it expects the iteration to end, for people to read.
    alternatives: what it weighed, the chosen one among them; empty where it weighed nothing by a forecast.
    """

    assignment: Assignment
    trains: bool
    reason: str
    memory: PolicyMemory | None = None
    group_order: tuple[int, ...] = ()
    ask_at_ms: int | None = None
    ends_at_ms: int | None = None
    alternatives: tuple[Alternative, ...] = ()

    def remembered(self, situation: Situation) -> Remembered:
        """What the state keeps of the choice."""
        if self.memory is None:
            return replace(situation.remembered, trains=self.trains)
        return Remembered(situation.incarnation, situation.iteration, self.assignment, self.trains, self.memory)


@dataclass(frozen=True, slots=True)
class Split:
    """How many GPUs each component has; the rollout in engines."""

    num_engines: int
    num_trainer_gpus: int
    num_inference_gpus: int


def minibatch_sizes(num_groups: int, num_minibatches: int) -> tuple[int, ...]:
    """In groups. Where they do not divide, the first minibatches have one group more."""
    each, more = divmod(num_groups, num_minibatches)
    return tuple(each + (nth < more) for nth in range(num_minibatches))


def minibatch_of(num_groups: int, num_minibatches: int) -> Ints:
    """By group: the minibatch that takes it in a fixed order."""
    found: Ints = np.repeat(np.arange(num_minibatches), minibatch_sizes(num_groups, num_minibatches))
    return found
