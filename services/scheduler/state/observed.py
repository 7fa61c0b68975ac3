"""Pictures: what components report of the open iteration while it runs, as frozen values. Policies decide on them.

A picture is whole, not a change: a later one replaces an earlier one, and the loss of one costs nothing. A picture has
columns, not objects, because an iteration has thousands of sequences and a decision has a few milliseconds. In every
column, the sequences of prompt `p` are at `p * group_size` up to the first one of prompt `p + 1`. The trainer takes
groups in the order of `Inferring.ready`.

Invariants, which the constructors check:
- Every sequence has one length and one place: an engine, the queue, away, or ended.
  [test_observed: contradicts_itself_is_refused]
- `Generation.queue` has the sequences whose place is `QUEUED`, the next one first.
  [test_observed: contradicts_itself_is_refused]
- Inference hands a group to the trainer once. [test_observed: inference_or_of_the_actor_that_cannot_be]
- A rate is finite, and a measured rate is above 0. [test_observed: inference_or_of_the_actor_that_cannot_be]
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
"""The sequence has no engine; see `Generation.queue`."""
AWAY = -2
"""The sequence is between two engines, or waits for its environment."""
ENDED = -3
CUT = -4
"""The sequence ended at the longest allowed length."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Engine:
    """`num_waiting` sequences are on the engine but do not run. `rate_tokens_per_s` is the total of those that run."""

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
    """The rollout's picture.

    `lengths` are tokens so far. `places` are indices in `engines`, or one of the constants above. `hints` are the mean
    numbers of tokens in an earlier epoch, by prompt: 0 where no epoch had the prompt. Empty: no epoch is over yet.
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
    def in_queue(self) -> Ints:
        """The sequences of `queue`, the next one first."""
        return np.array(self.queue, dtype=np.int64)

    @cached_property
    def hint_of(self) -> Floats:
        """By prompt: its hint; 0 where it has none."""
        return np.array(self.hints or (0.0,) * self.num_groups)

    @cached_property
    def is_unfinished(self) -> NDArray[np.bool_]:
        return self.place_of > ENDED

    @cached_property
    def num_unfinished(self) -> int:
        return int(self.is_unfinished.sum())

    @property
    def num_submitted(self) -> int:
        """How many unfinished sequences run or wait on an engine."""
        return sum(engine.num_running + engine.num_waiting for engine in self.engines)

    @cached_property
    def unfinished_by_group(self) -> Ints:
        by_group: Ints = self.is_unfinished.reshape(-1, self.group_size).sum(axis=1)
        return by_group


@dataclass(frozen=True, slots=True)
class Inferring:
    """Inference's picture.

    `ready` are the groups with log-probabilities, in the order in which the trainer gets them.
    `rate_tokens_per_s_per_gpu` is measured. None: nothing has been computed yet.
    `num_tokens_ahead`: tokens of responses that are scored ahead of their groups, of groups that are not ready.
    """

    ready: tuple[int, ...] = ()
    is_busy: bool = False
    rate_tokens_per_s_per_gpu: float | None = None
    num_tokens_ahead: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens_ahead < 0:
            raise ValueError(f"inference's picture: {self.num_tokens_ahead} tokens ahead; give at least 0")
        if self.ready and (min(self.ready) < 0 or len(set(self.ready)) < len(self.ready)):
            raise ValueError(
                f"inference's picture: {len(self.ready)} groups are ready, {len(set(self.ready))} different ones from "
                f"{min(self.ready)} on; give each group once, with a number of at least 0"
            )
        if self.rate_tokens_per_s_per_gpu is not None and not 0 < self.rate_tokens_per_s_per_gpu < math.inf:
            rate = f"{self.rate_tokens_per_s_per_gpu} tokens/s measured of a GPU"
            raise ValueError(f"inference's picture: {rate}; a measured rate is finite and above 0")


@dataclass(frozen=True, slots=True)
class TrainerRate:
    """The rate over the minibatches in this layout. Their durations count without `Training.update_s`."""

    layout: Layout
    rate_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Training:
    """The actor's picture.

    - `num_taken`: how many groups of `Inferring.ready` belong to a minibatch, the open one included.
    - `closes_at_ms`: the earliest likely end of the open minibatch, known while its last portion is under way.
    - `measured`: the rates by layout. The layout of the latest minibatch is the last.
    - `update_s`: the part of a minibatch's duration that does not depend on the number of GPUs. None: not measured yet.
    """

    num_minibatches_done: int = 0
    num_taken: int = 0
    is_at_boundary: bool = True
    closes_at_ms: int | None = None
    measured: tuple[TrainerRate, ...] = ()
    update_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_minibatches_done < 0 or self.num_taken < 0:
            counts = f"{self.num_minibatches_done} minibatches done and {self.num_taken} groups taken"
            raise ValueError(f"the actor's picture: {counts}; give at least 0 of each")
        for each in self.measured:
            if not 0 < each.rate_tokens_per_s < math.inf:
                rate = f"{each.rate_tokens_per_s} tokens/s measured in {each.layout}"
                raise ValueError(f"the actor's picture: {rate}; a measured rate is finite and above 0")
        if self.update_s is not None and not 0 <= self.update_s < math.inf:
            raise ValueError(f"the actor's picture: update_s={self.update_s}; a measured time is finite and at least 0")


Picture: TypeAlias = Generation | Inferring | Training


@dataclass(frozen=True, slots=True)
class Pictures:
    """The latest picture of each component in the open iteration.

    `marks` has the (boot, sequence) of the picture's event, or of the election of the present lead. An event with an
    older mark does not count.
    """

    generation: Generation | None = None
    inferring: Inferring | None = None
    training: Training | None = None
    marks: Mapping[Role, tuple[int, int]] = field(default_factory=dict)


def _problems(picture: Generation) -> tuple[str, ...]:
    size, count = picture.group_size, len(picture.lengths)
    if size < 1 or count % size or len(picture.places) != count:
        places = len(picture.places)
        return (f"{count} lengths and {places} places for groups of {size}; give each sequence one of each",)
    if picture.hints and len(picture.hints) != picture.num_groups:
        groups = picture.num_groups
        return (f"{len(picture.hints)} hints for {groups} groups; give each group one, 0 where nothing is known",)
    problems = []
    if count and (picture.length_of.min() < 0 or picture.place_of.min() < CUT):
        shortest, lowest = picture.length_of.min(), picture.place_of.min()
        problems.append(f"the least length is {shortest} and the least place {lowest}; they are at least 0 and {CUT}")
    elif count and picture.place_of.max() >= len(picture.engines):
        problems.append(
            f"a sequence is on engine {picture.place_of.max()}, but there are {len(picture.engines)} engines"
        )
    else:
        problems.extend(_wrong_counts(picture))
    twice = sorted(gpu for gpu, n in Counter(gpu for each in picture.engines for gpu in each.gpus).items() if n > 1)
    if twice:
        problems.append(f"{', '.join(twice)} in two engines; each GPU is in one")
    if any(each.kv_capacity_tokens <= 0 or each.max_running <= 0 for each in picture.engines):
        problems.append("an engine has no room for a sequence; kv_capacity_tokens and max_running are above 0")
    if any(not 0 <= each.rate_tokens_per_s < math.inf for each in picture.engines):
        problems.append("an engine has a rate that is not a finite number of at least 0")
    if any(not 0 <= hint < math.inf for hint in picture.hints):
        problems.append("a hint is not a finite number of at least 0")
    return tuple(problems)


def _wrong_counts(picture: Generation) -> list[str]:
    problems = []
    on_engine = np.bincount(picture.place_of[picture.place_of >= 0], minlength=len(picture.engines))
    for index, (engine, count) in enumerate(zip(picture.engines, on_engine, strict=True)):
        if (num := engine.num_running + engine.num_waiting) != count:
            problems.append(f"engine {index} counts {num} sequences, but {count} have it as their place")
    queued = np.flatnonzero(picture.place_of == QUEUED)
    if len(picture.queue) != len(queued) or sorted(picture.queue) != queued.tolist():
        counts = f"{len(picture.queue)} sequences are in the queue, but {len(queued)} have it as their place"
        problems.append(f"{counts}; they must be the same sequences")
    return problems
