"""What can be seen of a simulated iteration at one instant, as frozen values.

Invariant: nothing in a view is what only the simulator knows: no length of a response that has not ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.gpus import Gpus, Holder
from simulator.inference import Inference
from simulator.rollout import Rollout
from simulator.training import Trainer
from tidegate.types import GpuId, Layout

Progress = tuple[tuple[int, int], ...]
"""(sequence, tokens generated so far)."""


@dataclass(frozen=True, slots=True)
class EngineView:
    name: int
    gpus: tuple[GpuId, ...]
    running: Progress
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class TrainerView:
    gpus: tuple[GpuId, ...]
    layout: Layout | None
    minibatch: int
    num_taken: int
    """Groups of the minibatch that is open."""
    num_ready: int
    is_at_boundary: bool
    is_resizing: bool
    closes_at_s: float | None
    """The end of the minibatch, once its last group has been taken."""


@dataclass(frozen=True, slots=True)
class InferenceView:
    gpus: tuple[GpuId, ...]
    is_busy: bool
    num_backlog: int
    backlog_tokens: int


@dataclass(frozen=True, slots=True)
class View:
    at_s: float
    engines: tuple[EngineView, ...]
    waiting: Progress
    num_unfinished: int
    inference: InferenceView
    trainer: TrainerView
    free: tuple[GpuId, ...]
    leaving: tuple[GpuId, ...]
    lost: tuple[GpuId, ...]


def view_of(at_s: float, gpus: Gpus, rollout: Rollout, inference: Inference, trainer: Trainer) -> View:
    """The caller has advanced the engines."""
    return View(
        at_s=at_s,
        engines=tuple(
            EngineView(engine.name, engine.gpus, engine.progress(), engine.kv_tokens)
            for engine in rollout.engines.values()
        ),
        waiting=tuple((sequence.index, sequence.generated) for sequence in rollout.waiting),
        num_unfinished=rollout.num_unfinished,
        inference=_inference(inference),
        trainer=_trainer(trainer),
        free=gpus.held_by(Holder.FREE),
        leaving=gpus.held_by(Holder.LEAVING),
        lost=gpus.held_by(Holder.LOST),
    )


def _inference(inference: Inference) -> InferenceView:
    tokens = sum(num_tokens for _, num_tokens in inference.backlog)
    return InferenceView(inference.gpus, inference.is_busy, len(inference.backlog), tokens)


def _trainer(trainer: Trainer) -> TrainerView:
    return TrainerView(
        gpus=trainer.gpus,
        layout=trainer.layout,
        minibatch=trainer.minibatch,
        num_taken=len(trainer.taken),
        num_ready=len(trainer.ready),
        is_at_boundary=trainer.is_at_boundary,
        is_resizing=trainer.is_resizing,
        closes_at_s=trainer.closes_at_s,
    )
