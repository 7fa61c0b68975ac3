"""What a simulated iteration tells: happenings as frozen values, and what every stage shares to tell them.

Invariant: a happening is told once, in the order of the clock, unless a fault makes it late; then `told_s` says when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from simulator.clock import Clock
from simulator.gpus import Gpus
from tidegate.types import GpuId


class What(StrEnum):
    """Each says what `number`, `count` and `gpus` of its happening are."""

    SEQUENCE_FINISHED = "sequence_finished"
    """The sequence, its tokens."""
    GROUP_FINISHED = "group_finished"
    """The group, its tokens."""
    ROLLOUT_FINISHED = "rollout_finished"
    ENGINE_ACQUIRED = "engine_acquired"
    """The engine, its GPUs."""
    ENGINE_LEFT = "engine_left"
    """The engine, how many unfinished sequences it handed back, its GPUs, which are not free yet."""
    GPUS_FREED = "gpus_freed"
    """The GPUs."""
    INFERENCE_RESIZED = "inference_resized"
    """All the GPUs it has now."""
    GROUP_INFERRED = "group_inferred"
    """The group, its tokens."""
    INFERENCE_FINISHED = "inference_finished"
    MINIBATCH_STARTED = "minibatch_started"
    """The minibatch."""
    MINIBATCH_CLOSED = "minibatch_closed"
    """The minibatch: its last group has been taken, so its end is known; the groups in it."""
    MINIBATCH_FINISHED = "minibatch_finished"
    """The minibatch, its tokens: an optimizer step, after which the trainer may be resized."""
    TRAINER_RESIZED = "trainer_resized"
    """All the GPUs it has now."""
    TRAINER_DIED = "trainer_died"
    """The minibatch that begins again, the groups that are trained again."""
    MOVE_DROPPED = "move_dropped"
    """The lost GPU without which a move that waited cannot be made."""
    GPU_LOST = "gpu_lost"
    NODE_LOST = "node_lost"
    """All its GPUs; each is told of as lost, too."""
    NODE_BACK = "node_back"
    """All its GPUs."""
    FAULT_MISSED = "fault_missed"
    """The engine that was to die and does not run, how many do."""
    WOKE = "woke"
    """The number that was asked for."""
    ITERATION_FINISHED = "iteration_finished"


@dataclass(frozen=True, slots=True)
class Happening:
    at_s: float
    what: What
    number: int = 0
    count: int = 0
    gpus: tuple[GpuId, ...] = ()
    told_s: float | None = None
    """When it was told, where that was later."""

    def line(self) -> str:
        """One line of a history; equal histories are equal byte for byte."""
        late = "" if self.told_s is None else f" told {self.told_s!r}"
        return f"{self.at_s!r} {self.what} {self.number} {self.count} {','.join(self.gpus)}{late}"


@dataclass(frozen=True, slots=True)
class Shared:
    """Of all stages of one world."""

    clock: Clock
    gpus: Gpus
    publish: Callable[[Happening], None]
    freed: Callable[[], None]
    """Called when GPUs have become free, for those that wait for them."""

    def tell(self, what: What, number: int = 0, count: int = 0, gpus: tuple[GpuId, ...] = ()) -> None:
        self.publish(Happening(self.clock.now_s, what, number, count, gpus))
