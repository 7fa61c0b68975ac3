"""What a policy looks at when it chooses, and what it answers: frozen values, checked when made.

Invariants of a `Situation`:
- no GPU is in two places: an engine, the trainer, inference, free, on its way;
- engines are of one size and hold as many sequences as the groups say that they do;
- a group that is still generated has unfinished sequences, another none, and each has `group_size` in all;
- at most `num_minibatches` are done; a trainer without GPUs is between two updates.

Counts are exact; rates and costs are what was measured, here or in earlier iterations, and never zero where something
is divided by them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from services.scheduler.remembered import Assignment, EngineGpus, Remembered
from services.scheduler.values import JobSpec, Placed
from tidegate.types import GpuId, Layout, Role


@dataclass(frozen=True, slots=True)
class Engine:
    """`num_waiting` were given to it and do not run yet; `rate_tokens_per_s` is of all that run together."""

    gpus: EngineGpus
    num_running: int
    num_waiting: int
    num_kv_tokens: int
    kv_capacity_tokens: int
    max_running: int
    rate_tokens_per_s: float

    @property
    def kv_use(self) -> float:
        return self.num_kv_tokens / self.kv_capacity_tokens


@dataclass(frozen=True, slots=True)
class Sequence:
    """One that is not finished. `engine` counts in `Situation.engines`; None: no engine was given it yet."""

    num_tokens: int
    engine: int | None


class GroupStage(StrEnum):
    """How far a prompt's group is. `inferred` waits for the trainer, `taken` belongs to a minibatch."""

    GENERATING = "generating"
    GENERATED = "generated"
    INFERRED = "inferred"
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Group:
    """`finished` are lengths in tokens, `num_cut` of them ended at the longest that is allowed. `hint_tokens` is the
    mean length that an earlier epoch saw; None: none did."""

    stage: GroupStage
    finished: tuple[int, ...]
    unfinished: tuple[Sequence, ...]
    num_cut: int = 0
    hint_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class TrainerRate:
    """Measured over minibatches with this many GPUs."""

    layout: Layout
    rate_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Trainer:
    """`placed` is None while it has no GPUs. `is_at_boundary`: no minibatch is begun and not updated."""

    placed: Placed | None
    num_minibatches_done: int
    is_at_boundary: bool
    measured: tuple[TrainerRate, ...]

    @property
    def num_gpus(self) -> int:
        return len(self.placed.gpus) if self.placed else 0


@dataclass(frozen=True, slots=True)
class Inference:
    """Its backlog are the groups that are generated and not inferred."""

    gpus: tuple[GpuId, ...]
    rate_tokens_per_s_per_gpu: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Seconds of a decode step: `base + running * per_sequence + kv * per_kv_token`, at least `floor`."""

    floor_s: float
    base_s: float
    per_sequence_s: float
    per_kv_token_s: float

    def seconds(self, *, num_running: float, num_kv_tokens: float) -> float:
        roofline_s = self.base_s + num_running * self.per_sequence_s + num_kv_tokens * self.per_kv_token_s
        return max(self.floor_s, roofline_s)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a decode step and of each kind of switch, as measured. `resubmit_s`: a sequence that moves stands still."""

    decode: DecodeStep
    release_s: float
    acquire_s: float
    resubmit_s: float
    prefill_tokens_per_s: float
    reshard_s: float
    load_s: float
    inference_start_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """`groups` are in prompt order. `moving` are GPUs in an open transition: no component works on them."""

    now_ms: int
    incarnation: int
    iteration: int
    spec: JobSpec
    engines: tuple[Engine, ...]
    groups: tuple[Group, ...]
    trainer: Trainer
    inference: Inference
    free: tuple[GpuId, ...]
    moving: tuple[GpuId, ...]
    costs: Costs
    remembered: Remembered

    def __post_init__(self) -> None:
        for problem in (*_placing(self), *_rates(self), *_counting(self)):
            raise ValueError(f"situation of iteration {self.iteration}: {problem}")

    @property
    def num_submitted(self) -> int:
        """Unfinished sequences that an engine was given: running or waiting there."""
        return sum(engine.num_running + engine.num_waiting for engine in self.engines)

    @property
    def num_unfinished(self) -> int:
        return sum(len(group.unfinished) for group in self.groups)

    @property
    def num_sequences(self) -> int:
        return len(self.groups) * self.spec.group_size

    @property
    def is_inferred(self) -> bool:
        """Whether inference has nothing left to do in this iteration."""
        return all(group.stage in (GroupStage.INFERRED, GroupStage.TAKEN) for group in self.groups)


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
    if not 0 <= trainer.num_minibatches_done <= situation.spec.num_minibatches:
        done, all_of_them = trainer.num_minibatches_done, situation.spec.num_minibatches
        problems.append(f"{done} minibatches are done, it has {all_of_them}")
    if trainer.placed is None and not trainer.is_at_boundary:
        problems.append("a minibatch is begun and the trainer has no GPUs; what was not updated is dropped first")
    return tuple(problems)


def _rates(situation: Situation) -> tuple[str, ...]:
    rates = {
        "inference's rate": situation.inference.rate_tokens_per_s_per_gpu,
        "the prefill rate": situation.costs.prefill_tokens_per_s,
        "the decode step's floor": situation.costs.decode.floor_s,
        **{f"the trainer's rate at {each.layout}": each.rate_tokens_per_s for each in situation.trainer.measured},
        **{f"the KV capacity of {each.gpus[0]}'s engine": each.kv_capacity_tokens for each in situation.engines},
    }
    return tuple(f"{name} is {value}, it must be above 0" for name, value in rates.items() if value <= 0)


def _counting(situation: Situation) -> tuple[str, ...]:
    problems = []
    for prompt, group in enumerate(situation.groups):
        size = len(group.finished) + len(group.unfinished)
        if size != situation.spec.group_size:
            problems.append(f"group {prompt} has {size} sequences, the group size is {situation.spec.group_size}")
        if bool(group.unfinished) != (group.stage is GroupStage.GENERATING):
            problems.append(f"group {prompt} is {group.stage} with {len(group.unfinished)} unfinished sequences")
    held = Counter(each.engine for group in situation.groups for each in group.unfinished)
    for index, engine in enumerate(situation.engines):
        told = engine.num_running + engine.num_waiting
        if told != held[index]:
            problems.append(f"engine {index} tells of {told} sequences, the groups of {held[index]}")
    if len(situation.groups) < situation.spec.num_prompts:
        problems.append(f"{len(situation.groups)} groups, at least {situation.spec.num_prompts} prompts were asked for")
    strangers = sorted(each for each in held if each is not None and not 0 <= each < len(situation.engines))
    if strangers:
        problems.append(f"sequences on engine {strangers[0]}, there are {len(situation.engines)}")
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class Choice:
    """`trains`: whether the trainer may begin its next minibatch. `group_order`: in which prompts are to be given to
    engines; empty leaves it as it is."""

    assignment: Assignment
    trains: bool
    remembered: Remembered
    reason: str
    group_order: tuple[int, ...] = ()


def engine_size(spec: JobSpec) -> int:
    """GPUs of an engine."""
    return replica_size(spec.placement[Role.ROLLOUT].layout)


def replica_size(layout: Layout) -> int:
    """GPUs of one data-parallel copy."""
    return layout.num_ranks // layout.dp


def with_dp(layout: Layout, dp: int) -> Layout | None:
    """The layout with so many data-parallel copies; None where its experts do not divide over them."""
    return replace(layout, dp=dp) if dp >= 1 and dp * layout.cp % layout.ep == 0 else None


def as_engines(gpus: tuple[GpuId, ...], size: int) -> tuple[EngineGpus, ...]:
    """Consecutive GPUs an engine; what does not fill the last one is left out."""
    return tuple(gpus[start : start + size] for start in range(0, len(gpus) - size + 1, size))


def as_configured(spec: JobSpec) -> Assignment:
    return Assignment(
        engines=as_engines(spec.placement[Role.ROLLOUT].gpus, engine_size(spec)),
        trainer=spec.placement[Role.ACTOR],
        inference=spec.placement[Role.INFERENCE].gpus,
    )


def placed_gpus(spec: JobSpec) -> tuple[GpuId, ...]:
    """Of all components, in the order actor, rollout, inference; those standing by are left out."""
    return tuple(gpu for role in (Role.ACTOR, Role.ROLLOUT, Role.INFERENCE) for gpu in spec.placement[role].gpus)
