"""What components tell of the open iteration while it runs, as frozen values: what a policy stands on.

Each is a whole picture, not a change: a later one replaces an earlier one, and one that is lost costs nothing. They are
columns, not objects, because an iteration has thousands of sequences and a decision a few milliseconds.

Invariants (checked when made):
- the sequences of prompt `p` are `p * group_size` up to the next prompt's, in every column;
- a sequence is in one place: on an engine, queued, away, or ended; `queue` are those queued, next first;
- a group is handed to the trainer once, and taken in the order of `Inferring.ready`;
- a rate is finite, and above 0 where it is one that something was measured to have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.types import GpuId, Layout, Role

QUEUED = -1
"""No engine was given it; see `Generation.queue`."""
AWAY = -2
"""Between two engines, or with its environment."""
ENDED = -3
CUT = -4
"""Ended at the longest that is allowed."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Engine:
    """`num_waiting` were given to it and do not run yet; `rate_tokens_per_s` is of all that run together."""

    gpus: tuple[GpuId, ...]
    num_running: int
    num_waiting: int
    num_kv_tokens: int
    kv_capacity_tokens: int
    max_running: int
    rate_tokens_per_s: float

    @property
    def kv_use(self) -> float:
        return self.num_kv_tokens / self.kv_capacity_tokens


@dataclass(frozen=True)
class Generation:
    """The rollout's word. `lengths` are tokens so far, `places` indices in `engines` or constants above.

    `hints` are, by prompt, the mean tokens that an earlier epoch saw, 0 where none did; empty: there was none.
    """

    engines: tuple[Engine, ...]
    group_size: int
    lengths: tuple[int, ...]
    places: tuple[int, ...]
    queue: tuple[int, ...] = ()
    hints: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(f"the rollout's picture: {problem}")

    @property
    def num_groups(self) -> int:
        return len(self.lengths) // self.group_size

    @cached_property
    def length_of(self) -> Ints:
        return np.array(self.lengths, dtype=np.int64)

    @cached_property
    def place_of(self) -> Ints:
        return np.array(self.places, dtype=np.int64)

    @cached_property
    def is_unfinished(self) -> NDArray[np.bool_]:
        return self.place_of > ENDED

    @cached_property
    def num_unfinished(self) -> int:
        return int(self.is_unfinished.sum())

    @property
    def num_submitted(self) -> int:
        """Unfinished sequences that an engine was given: running or waiting there."""
        return sum(engine.num_running + engine.num_waiting for engine in self.engines)

    @cached_property
    def unfinished_by_group(self) -> Ints:
        by_group: Ints = self.is_unfinished.reshape(-1, self.group_size).sum(axis=1)
        return by_group


@dataclass(frozen=True, slots=True)
class Inferring:
    """Inference's word. `ready` are groups with log-probabilities, in the order in which the trainer gets them;
    `rate_tokens_per_s_per_gpu` is measured, None before anything was computed."""

    ready: tuple[int, ...] = ()
    is_busy: bool = False
    rate_tokens_per_s_per_gpu: float | None = None

    def __post_init__(self) -> None:
        if self.ready and (min(self.ready) < 0 or len(set(self.ready)) < len(self.ready)):
            raise ValueError(
                f"inference's picture: {len(self.ready)} groups are ready, {len(set(self.ready))} different ones from "
                f"{min(self.ready)} on; each is handed on once, and they count from 0"
            )
        if self.rate_tokens_per_s_per_gpu is not None and not 0 < self.rate_tokens_per_s_per_gpu < math.inf:
            rate = f"{self.rate_tokens_per_s_per_gpu} tokens/s measured of a GPU"
            raise ValueError(f"inference's picture: {rate}; a measured rate is finite and above 0")


@dataclass(frozen=True, slots=True)
class TrainerRate:
    """Measured over minibatches in this layout, what no GPU makes shorter (`Training.update_s`) left out."""

    layout: Layout
    rate_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Training:
    """The actor's word. `num_taken` of `Inferring.ready` belong to a minibatch, the open one included; `closes_at_ms`:
    when the open one ends, once its last group has been taken; `update_s`: what of a minibatch no GPU makes shorter,
    None while that is only assumed; `measured`: the layout that was trained in last is the last."""

    num_minibatches_done: int = 0
    num_taken: int = 0
    is_at_boundary: bool = True
    closes_at_ms: int | None = None
    measured: tuple[TrainerRate, ...] = ()
    update_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_minibatches_done < 0 or self.num_taken < 0:
            counts = f"{self.num_minibatches_done} minibatches done and {self.num_taken} groups taken"
            raise ValueError(f"the actor's picture: {counts}; neither is below 0")
        for each in self.measured:
            if not 0 < each.rate_tokens_per_s < math.inf:
                rate = f"{each.rate_tokens_per_s} tokens/s measured in {each.layout}"
                raise ValueError(f"the actor's picture: {rate}; a measured rate is finite and above 0")
        if self.update_s is not None and not 0 <= self.update_s < math.inf:
            raise ValueError(f"the actor's picture: update_s={self.update_s}; a measured time is finite and at least 0")


Picture: TypeAlias = Generation | Inferring | Training


@dataclass(frozen=True, slots=True)
class Seen:
    """The latest picture of each component in the open iteration. `marks`: (boot, sequence) of what it was told in, or
    of the election since which its lead is believed."""

    generation: Generation | None = None
    inferring: Inferring | None = None
    training: Training | None = None
    marks: Mapping[Role, tuple[int, int]] = field(default_factory=dict)


def _problems(told: Generation) -> tuple[str, ...]:
    size, count = told.group_size, len(told.lengths)
    if size < 1 or count % size or len(told.places) != count:
        return (f"{count} lengths and {len(told.places)} places for groups of {size}; each sequence has one of each",)
    if told.hints and len(told.hints) != told.num_groups:
        return (f"{len(told.hints)} hints for {told.num_groups} groups; each has one, 0 where nothing is known",)
    problems = []
    if count and (told.length_of.min() < 0 or told.place_of.min() < CUT):
        problems.append(f"a length of {told.length_of.min()} or a place of {told.place_of.min()}, which there is not")
    elif count and told.place_of.max() >= len(told.engines):
        problems.append(f"sequences on engine {told.place_of.max()}, there are {len(told.engines)}")
    else:
        problems.extend(_miscounted(told))
    twice = sorted(gpu for gpu, n in Counter(gpu for each in told.engines for gpu in each.gpus).items() if n > 1)
    if twice:
        problems.append(f"{', '.join(twice)} in two engines; each GPU is in one")
    if any(each.kv_capacity_tokens <= 0 or each.max_running <= 0 for each in told.engines):
        problems.append("an engine without room for a sequence; kv_capacity_tokens and max_running are above 0")
    if any(not 0 <= each.rate_tokens_per_s < math.inf for each in told.engines):
        problems.append("an engine whose rate is below 0 or no number")
    if any(not 0 <= hint < math.inf for hint in told.hints):
        problems.append("a hint that is below 0 or no number")
    return tuple(problems)


def _miscounted(told: Generation) -> list[str]:
    problems = []
    held = np.bincount(told.place_of[told.place_of >= 0], minlength=len(told.engines))
    for index, (engine, count) in enumerate(zip(told.engines, held, strict=True)):
        if (num := engine.num_running + engine.num_waiting) != count:
            problems.append(f"engine {index} tells of {num} sequences, the places of {count}")
    queued = np.flatnonzero(told.place_of == QUEUED)
    if len(told.queue) != len(queued) or sorted(told.queue) != queued.tolist():
        problems.append(f"{len(told.queue)} sequences in the queue, {len(queued)} places say so; they must be the same")
    return problems
