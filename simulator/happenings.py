"""The happenings that a simulated iteration reports, as frozen values, and the parts that all stages share.

Invariant: a happening is reported once, in the order of the clock. A fault may delay it; `reported_s` then has the time
of the report. [test_world: a_late_happening_is_reported_once]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from simulator.clock import Clock
from simulator.gpus import Gpus
from tidegate.types import GpuId


class What(StrEnum):
    """The kind of a happening. Each docstring gives the meaning of its `number`, `count` and `gpus`."""

    SEQUENCE_FINISHED = "sequence_finished"
    """number: the sequence; count: its tokens."""
    GROUP_FINISHED = "group_finished"
    """number: the group; count: its tokens."""
    ROLLOUT_FINISHED = "rollout_finished"
    ENGINE_ACQUIRED = "engine_acquired"
    """number: the engine; gpus: its GPUs."""
    ENGINE_LEFT = "engine_left"
    """number: the engine; count: its unfinished sequences, which go back to the queue; gpus: its GPUs, not free yet."""
    GPUS_FREED = "gpus_freed"
    """gpus: the GPUs that are free now."""
    INFERENCE_RESIZED = "inference_resized"
    """gpus: all GPUs of the inference now."""
    GROUP_INFERRED = "group_inferred"
    """number: the group; count: its tokens."""
    INFERENCE_FINISHED = "inference_finished"
    MINIBATCH_STARTED = "minibatch_started"
    """number: the minibatch."""
    MINIBATCH_CLOSED = "minibatch_closed"
    """The trainer has taken the last group, so the end of the minibatch is known. number: the minibatch; count: its
    groups."""
    MINIBATCH_FINISHED = "minibatch_finished"
    """An optimizer step, after which the trainer may be resized. number: the minibatch; count: its tokens."""
    TRAINER_RESIZED = "trainer_resized"
    """gpus: all GPUs of the trainer now."""
    TRAINER_DIED = "trainer_died"
    """number: the minibatch that begins again; count: the groups that are trained again."""
    MOVE_DROPPED = "move_dropped"
    """A waiting move is no longer possible. gpus: the lost GPU that it needs."""
    GPU_LOST = "gpu_lost"
    NODE_LOST = "node_lost"
    """gpus: all GPUs of the node. GPU_LOST reports each of them too."""
    NODE_BACK = "node_back"
    """gpus: all GPUs of the node."""
    FAULT_MISSED = "fault_missed"
    """The engine of a fault does not run. number: the engine; count: the running engines. Or its node is lost already.
    gpus: those of the node."""
    WOKE = "woke"
    """number: the number in the request for a wake-up."""
    ITERATION_FINISHED = "iteration_finished"


@dataclass(frozen=True, slots=True)
class Happening:
    at_s: float
    what: What
    number: int = 0
    count: int = 0
    gpus: tuple[GpuId, ...] = ()
    reported_s: float | None = None
    """The time of the report if it is late."""

    def line(self) -> str:
        """One line of a history. Equal histories have equal bytes, so the word `told` stays."""
        late = "" if self.reported_s is None else f" told {self.reported_s!r}"
        return f"{self.at_s!r} {self.what} {self.number} {self.count} {','.join(self.gpus)}{late}"


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all stages of one world share."""

    clock: Clock
    gpus: Gpus
    publish: Callable[[Happening], None]
    freed: Callable[[], None]
    """Called after GPUs have become free, so that waiting stages can take them."""

    def report(self, what: What, number: int = 0, count: int = 0, gpus: tuple[GpuId, ...] = ()) -> None:
        self.publish(Happening(self.clock.now_s, what, number, count, gpus))
