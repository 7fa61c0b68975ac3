"""What a plan divides: the GPUs that are there, in the units of each component, and what each number of them can do.

Invariants: `unit_rates` never falls where a larger layout does not exist: the copies that there is none for are left
out; a minibatch that does not divide over the copies runs at the pace of the copy with most of it, so that no number of
GPUs is ruled out by divisibility.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.scheduler.policy.situation import Situation
from services.scheduler.policy.stages import Split
from services.scheduler.policy.trainer_rates import trainer_curve
from services.scheduler.state.layouts import engine_size, replica_size
from services.scheduler.state.observed import Floats, Ints
from services.scheduler.state.remembered import Assignment
from tidegate.types import GpuId, Role


@dataclass(frozen=True, slots=True)
class Plans:
    """By plan; the second axis are the minibatches to come. `start_s`: when the first moves are made, from now; it
    counts only while the trainer is between two updates. `waits`, of all of them, where the last minibatch is all that
    is to come: before it the trainer gives its GPUs to the engines, until the rollout is over."""

    start_s: Floats
    trainer: Ints
    inference: Ints
    waits: bool = False

    def __post_init__(self) -> None:
        assert not self.waits or self.trainer.shape[1] == 1, "only the last minibatch waits"

    @property
    def count(self) -> int:
        return len(self.start_s)

    def row(self, index: int) -> Plans:
        own = slice(index, index + 1)
        return Plans(self.start_s[own], self.trainer[own], self.inference[own], self.waits)

    @staticmethod
    def of(*several: Plans) -> Plans:
        """All of them wait as the first does."""
        return Plans(
            np.concatenate([each.start_s for each in several]),
            np.concatenate([each.trainer for each in several]),
            np.concatenate([each.inference for each in several]),
            several[0].waits,
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the plans divide. `unit_rates[k]` are the trainer's tokens a second with k data-parallel copies, 0 where
    there are too few for any layout; `switch_s` are the seconds from one number of copies to another, [before, after].
    `until_s`: the end of the open minibatch once it is known, or None."""

    num_gpus: int
    engine_size: int
    unit_size: int
    unit_rates: Floats
    switch_s: Floats
    inference_rate: float
    max_running: int
    kv_capacity_tokens: int
    num_engines: int
    num_trainer_gpus: int
    num_inference_gpus: int
    is_open: bool
    until_s: float | None

    def units(self, num_gpus: Floats) -> Ints:
        """Data-parallel copies of the trainer, at most those that there are rates for."""
        copies: Ints = np.minimum(num_gpus / self.unit_size, len(self.unit_rates) - 1).astype(np.int64)
        return copies


def cluster_of(
    situation: Situation, assignment: Assignment, there: tuple[GpuId, ...], *, trained_on: tuple[int, ...] = ()
) -> Cluster:
    """As it will be once what is assigned is carried out. `trained_on`: numbers of copies whose groups are there."""
    training, engines = situation.trainer.training, situation.engines
    until_s = None if training.closes_at_ms is None else max(0.0, (training.closes_at_ms - situation.now_ms) / 1000)
    return Cluster(
        num_gpus=len(there),
        engine_size=engine_size(situation.spec),
        unit_size=unit_size(situation),
        unit_rates=_unit_rates(situation, len(there)),
        switch_s=situation.costs.trainer_switches_s(
            copy_size=unit_size(situation), most=len(there) // unit_size(situation), known=trained_on
        ),
        inference_rate=situation.inference_tokens_per_s_per_gpu,
        max_running=min((engine.max_running for engine in engines), default=1),
        kv_capacity_tokens=min((engine.kv_capacity_tokens for engine in engines), default=1),
        num_engines=len(assignment.engines),
        num_trainer_gpus=situation.trainer.num_gpus,
        num_inference_gpus=len(assignment.inference),
        is_open=not training.is_at_boundary,
        until_s=until_s,
    )


def gpus_there(situation: Situation) -> tuple[GpuId, ...]:
    """All that can be assigned, those on their way included, by id."""
    trainer = situation.trainer.placed
    held = {gpu for engine in situation.engines for gpu in engine.gpus}
    held.update(situation.inference.gpus, situation.free, situation.moving, trainer.gpus if trainer else ())
    return tuple(sorted(held))


def unit_size(situation: Situation) -> int:
    """GPUs of a data-parallel copy of the trainer."""
    return replica_size(situation.spec.placement[Role.ACTOR].layout)


def copy_size(situation: Situation) -> int:
    """GPUs of a copy of inference."""
    return replica_size(situation.spec.placement[Role.INFERENCE].layout)


def can_train(situation: Situation, num_gpus: int) -> bool:
    """Whether a copy fits."""
    return num_gpus >= unit_size(situation)


def fitting(situation: Situation, split: Split, num_gpus: int, *, keeps_trainer: bool = False) -> Split:
    """As much of it as there are GPUs for: while it has work the rollout has an engine, then inference a copy, then the
    trainer what it was to have. What is left is the rollout's, or inference's once nothing is generated.

    `keeps_trainer`: it cannot give up any now, so that the others have to do with the rest.
    """
    size, unit, copy = engine_size(situation.spec), unit_size(situation), copy_size(situation)
    if situation.is_inferred:
        return Split(0, num_gpus // unit * unit, 0)
    least = size if situation.num_unfinished else 0
    room = max(0, num_gpus - least - (split.num_trainer_gpus if keeps_trainer else 0))
    inference = max(copy, min(split.num_inference_gpus, room if keeps_trainer else room - unit))
    inference = min(inference, room) // copy * copy
    trainer = split.num_trainer_gpus
    if not keeps_trainer:
        trainer = max(0, min(trainer, num_gpus - least - inference)) // unit * unit
    if not situation.num_unfinished:
        return Split(0, trainer, (num_gpus - trainer) // copy * copy)
    return Split((num_gpus - trainer - inference) // size, trainer, inference)


def _unit_rates(situation: Situation, num_gpus: int) -> Floats:
    unit, curve = unit_size(situation), trainer_curve(situation)
    layout = situation.spec.placement[Role.ACTOR].layout
    dp = np.arange(num_gpus // unit + 1)
    # As `with_dp` has it, of many numbers of copies.
    divides = (situation.spec.num_logical_shards or 0) % np.maximum(dp, 1) == 0
    dp = np.where((dp <= curve.num_sequences) & (dp * layout.cp % layout.ep == 0) & divides, dp, 0)
    dp = np.maximum.accumulate(dp)
    return np.where(dp > 0, curve.tokens_per_s(np.maximum(dp, 1), copy_size=unit), 0.0)
