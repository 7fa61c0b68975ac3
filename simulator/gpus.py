"""The holder and the activity of each GPU of the simulated cluster, with their times.

Invariants:
- A GPU has one holder at any time. [test_simulator: every_sequence_ends_once]
- A move names the present holder, and leaves it only then. [test_gpu_holders: only_from_its_present_holder]
- Between two roles a GPU is free. [test_world: a_refused_move_changes_nothing]
- A lost GPU is free before it has a holder again. [test_world: a_gpu_that_comes_back_is_free]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tidegate.types import GpuId


class Holder(StrEnum):
    FREE = "free"
    ACTOR = "actor"
    ROLLOUT = "rollout"
    INFERENCE = "inference"
    LEAVING = "leaving"
    """The role has released the GPU, but its memory is not free yet."""
    LOST = "lost"


class Doing(StrEnum):
    """The use of a GPU's time."""

    GENERATING = "generating"
    INFERRING = "inferring"
    TRAINING = "training"
    SWITCHING = "switching"
    """The GPU changes from one use to another."""
    WAITING = "waiting"
    """The GPU has a holder and no work."""
    FREE = "free"
    LOST = "lost"


_ACTIVITY_AFTER_MOVE = {Holder.FREE: Doing.FREE, Holder.LOST: Doing.LOST}
"""The activity after a move to this holder. For any other holder it is SWITCHING until the holder marks another."""


class MoveRefused(ValueError):
    """The move is not possible now. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Change:
    at_s: float
    gpu: GpuId
    holder: Holder


class Gpus:
    """All GPUs are free at the start. `doings` has, by GPU, the start and the kind of each activity."""

    def __init__(self, gpus: Iterable[GpuId], at_s: float = 0.0) -> None:
        self._holder = dict.fromkeys(gpus, Holder.FREE)
        self.changes: list[Change] = []
        self.doings: dict[GpuId, list[tuple[float, Doing]]] = {gpu: [(at_s, Doing.FREE)] for gpu in self._holder}

    @property
    def cluster(self) -> tuple[GpuId, ...]:
        """All GPUs, lost ones included."""
        return tuple(self._holder)

    def holder(self, gpu: GpuId) -> Holder:
        """MoveRefused: the cluster does not have the GPU."""
        if gpu not in self._holder:
            raise MoveRefused(f"GPU {gpu} is not in the cluster, which has {len(self._holder)}: {self._range()}")
        return self._holder[gpu]

    def held_by(self, holder: Holder) -> tuple[GpuId, ...]:
        """The GPUs of a holder in the cluster's order."""
        return tuple(gpu for gpu, has in self._holder.items() if has is holder)

    def move(self, gpus: Iterable[GpuId], before: Holder, after: Holder, at_s: float) -> None:
        """Move all GPUs. MoveRefused: none is moved."""
        moved = tuple(gpus)
        if wrong := [f"{gpu} ({held})" for gpu in moved if (held := self.holder(gpu)) is not before]:
            raise MoveRefused(f"{', '.join(wrong)} cannot go from {before} to {after}: only a GPU that is {before} can")
        if len(set(moved)) < len(moved):
            raise MoveRefused(f"a GPU is named twice in {', '.join(moved)}: name each once")
        for gpu in moved:
            self._holder[gpu] = after
            self.changes.append(Change(at_s, gpu, after))
        self.mark(moved, _ACTIVITY_AFTER_MOVE.get(after, Doing.SWITCHING), at_s)

    def mark(self, gpus: Iterable[GpuId], doing: Doing, at_s: float) -> None:
        """Set the activity of GPUs from `at_s` on."""
        for gpu in gpus:
            marks = self.doings[gpu]
            if marks[-1][1] is not doing:
                marks.append((at_s, doing))

    def lose(self, gpu: GpuId, at_s: float) -> Holder:
        """Mark a GPU as lost, and return its holder before."""
        before = self.holder(gpu)
        if before is not Holder.LOST:
            self.move([gpu], before, Holder.LOST, at_s)
        return before

    def _range(self) -> str:
        names = self.cluster
        return f"{names[0]} to {names[-1]}" if names else "none"
