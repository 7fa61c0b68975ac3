"""What a plan divides: the GPUs that are there, in the units of each component, and the speed of each number of units.

Invariants:
- More GPUs are never slower for want of a layout: `unit_rates` has the rate of the next smaller one.
  [test_cluster: never_fall_where_a_larger_layout]
- Divisibility rules out no number of GPUs: a minibatch that does not divide over the copies runs at the pace of the
  copy with most of it. [test_tide_policy: a_trainer_of_any_number_of_copies]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.scheduler.policy.actor_layouts import ActorLayouts, actor_layouts, fewest_gpus, step_of
from services.scheduler.policy.situation import Situation, Split
from services.scheduler.policy.trainer_rates import num_sequences
from services.scheduler.state.layouts import engine_size, replica_size
from services.scheduler.state.observed import Engine, Floats, Ints
from services.scheduler.state.remembered import Assignment
from tidegate.types import GpuId, Role


@dataclass(frozen=True, slots=True)
class Plans:
    """Several plans: the first axis is the plan, the second the minibatches to come.

    start_s: seconds from now until the first moves; it counts only while the trainer is between two updates.
    trainer, inference: GPUs during each minibatch; engines have the others.
    infer_s: seconds from now until inference gets the GPUs of its first stage, ahead of the trainer. None: with it.
    """

    start_s: Floats
    trainer: Ints
    inference: Ints
    infer_s: Floats | None = None

    @property
    def count(self) -> int:
        return len(self.start_s)

    @property
    def infers_s(self) -> Floats:
        """Seconds from now until inference gets its GPUs, at the latest when the trainer does."""
        return self.start_s if self.infer_s is None else np.minimum(self.infer_s, self.start_s)

    def row(self, index: int) -> Plans:
        return self.rows(np.array([index]))

    def rows(self, rows: Ints) -> Plans:
        """Some of the plans, in this order."""
        infer_s = None if self.infer_s is None else self.infer_s[rows]
        return Plans(self.start_s[rows], self.trainer[rows], self.inference[rows], infer_s)

    @staticmethod
    def of(*several: Plans) -> Plans:
        return Plans(
            np.concatenate([each.start_s for each in several]),
            np.concatenate([each.trainer for each in several]),
            np.concatenate([each.inference for each in several]),
            np.concatenate([each.infers_s for each in several]),
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the plans divide.

    unit_size: the step in which the trainer's GPUs are counted: those of a data-parallel copy, where it has one kind of
      copies.
    unit_rates: the trainer's tokens a second by number of units; 0 where these are too few for any layout.
    switch_s: seconds from one number of units to another, [before, after].
    inference_rate: tokens a second of one GPU.
    copy_size: GPUs of a copy of inference.
    is_open: a minibatch is open, and the trainer cannot move before its end.
    num_trainer_gpus: those that the trainer has; in a fixed order none where it lends them. With `arrival` a lending
      trainer counts as present, and begins with its first group: by forecasts alone it would start too late.
    until_s: seconds until the end of the open minibatch; None while it is not known.
    carries: the trainer goes on with an open minibatch while its new GPUs are released, and after it has moved.
    num_working: engines with sequences, once no sequence waits for an engine. None: all.
    """

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
    carries: bool = False
    num_working: int | None = None
    copy_size: int = 1

    def units(self, num_gpus: Floats) -> Ints:
        """Units of the trainer, at most those with a rate."""
        units: Ints = np.minimum(num_gpus / self.unit_size, len(self.unit_rates) - 1).astype(np.int64)
        return units


def trainer_layouts(situation: Situation, num_gpus: int) -> ActorLayouts:
    """The layouts of the trainer on up to `num_gpus` GPUs, as forecasts and seats have them."""
    return actor_layouts(situation, num_gpus, most_copies=num_sequences(situation))


def cluster_of(situation: Situation, assignment: Assignment, there: tuple[GpuId, ...]) -> Cluster:
    """The cluster with the assignment carried out."""
    training, engines = situation.trainer.training, situation.engines
    layouts = trainer_layouts(situation, len(there))
    until_s = _until_s(situation, training.closes_at_ms)
    return Cluster(
        num_gpus=len(there),
        engine_size=engine_size(situation.spec),
        unit_size=layouts.step,
        unit_rates=layouts.rates,
        switch_s=layouts.switches_s(situation.costs),
        inference_rate=situation.inference_tokens_per_s_per_gpu,
        max_running=min((engine.max_running for engine in engines), default=1),
        kv_capacity_tokens=min((engine.kv_capacity_tokens for engine in engines), default=1),
        num_engines=len(assignment.engines),
        # A trainer that lends its GPUs has none, though it still holds them now.
        num_trainer_gpus=0 if assignment.trainer is None else situation.trainer.num_gpus,
        num_inference_gpus=len(assignment.inference),
        is_open=not can_move(situation),
        until_s=until_s,
        carries=situation.spec.carries_gradients,
        num_working=None if situation.generation.queue else sum(map(_works, engines)),
        copy_size=copy_size(situation),
    )


def can_move(situation: Situation) -> bool:
    """Whether the trainer can change its GPUs now, or after the portion under way: between two updates, and where
    gradients are carried until an open minibatch has its last group."""
    training = situation.trainer.training
    return training.is_at_boundary or (situation.spec.carries_gradients and training.closes_at_ms is None)


def num_idle_engines(situation: Situation) -> int:
    """Engines without a sequence, once no sequence waits for an engine."""
    return 0 if situation.generation.queue else sum(not _works(engine) for engine in situation.engines)


def _works(engine: Engine) -> bool:
    return engine.num_running + engine.num_waiting > 0


def _until_s(situation: Situation, at_ms: int | None) -> float | None:
    return None if at_ms is None else max(0.0, (at_ms - situation.now_ms) / 1000)


def gpus_there(situation: Situation) -> tuple[GpuId, ...]:
    """All GPUs that can be assigned, those in open transitions included, by id."""
    trainer = situation.trainer.placed
    held = {gpu for engine in situation.engines for gpu in engine.gpus}
    held.update(situation.inference.gpus, situation.free, situation.moving, trainer.gpus if trainer else ())
    return tuple(sorted(held))


def unit_size(situation: Situation) -> int:
    """The step in which the trainer's GPUs are counted."""
    return step_of(situation.spec)


def copy_size(situation: Situation) -> int:
    """GPUs of a copy of inference."""
    return replica_size(situation.spec.placement[Role.INFERENCE].layout)


def can_train(situation: Situation, num_gpus: int) -> bool:
    """Whether the smallest layout of the trainer fits."""
    return num_gpus >= fewest_gpus(situation.spec)


def fitting(situation: Situation, split: Split, num_gpus: int, *, keeps_trainer: bool = False) -> Split:
    """The split, cut to `num_gpus` GPUs. Components get theirs in this order:

    1. the rollout one engine, while it has work;
    2. inference one copy;
    3. the trainer its smallest layout;
    4. inference the rest of its share, then the trainer the rest of its share;
    5. the rollout what is left, or inference once nothing is generated.

    Once nothing is left to infer, the trainer gets all. `keeps_trainer`: the trainer cannot give up GPUs now, so that
    its whole share comes after the rollout's engine.
    """
    size, unit, copy = engine_size(situation.spec), unit_size(situation), copy_size(situation)
    if situation.is_inferred:
        return Split(0, num_gpus // unit * unit, 0)
    least = size if situation.num_unfinished else 0
    room = max(0, num_gpus - least - (split.num_trainer_gpus if keeps_trainer else 0))
    inference = max(copy, min(split.num_inference_gpus, room if keeps_trainer else room - fewest_gpus(situation.spec)))
    inference = min(inference, room) // copy * copy
    trainer = split.num_trainer_gpus
    if not keeps_trainer:
        trainer = max(0, min(trainer, num_gpus - least - inference)) // unit * unit
    if not situation.num_unfinished:
        return Split(0, trainer, (num_gpus - trainer) // copy * copy)
    return Split((num_gpus - trainer - inference) // size, trainer, inference)
