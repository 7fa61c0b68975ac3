"""Who holds each GPU of the simulated cluster and what it does, and since when.

Invariants: a GPU has one holder at any time; it goes from one holder to another only by a move that names the holder it
has, and between two roles it is free in between; a lost GPU is free again before anybody has it.
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
    """Released and not yet free: the memory is still being given back."""
    LOST = "lost"


class Doing(StrEnum):
    """What a GPU's time goes to."""

    GENERATING = "generating"
    INFERRING = "inferring"
    TRAINING = "training"
    SWITCHING = "switching"
    """On its way from one use to another."""
    WAITING = "waiting"
    """Held, with no work."""
    FREE = "free"
    LOST = "lost"


_WHEN_HELD = {Holder.FREE: Doing.FREE, Holder.LOST: Doing.LOST}
"""Who gets a GPU has to make it ready first, and says when it is; who leaves it, too."""


class MoveRefused(ValueError):
    """A move that cannot be made as things stand; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Change:
    at_s: float
    gpu: GpuId
    holder: Holder


class Gpus:
    """All free at the start. `doings` are, by GPU, what it does from when on."""

    def __init__(self, gpus: Iterable[GpuId]) -> None:
        self._holder = dict.fromkeys(gpus, Holder.FREE)
        self.changes: list[Change] = []
        self.doings: dict[GpuId, list[tuple[float, Doing]]] = {gpu: [(0.0, Doing.FREE)] for gpu in self._holder}

    @property
    def cluster(self) -> tuple[GpuId, ...]:
        """All of them, lost ones too."""
        return tuple(self._holder)

    def holder(self, gpu: GpuId) -> Holder:
        """MoveRefused for a GPU that the cluster lacks."""
        if gpu not in self._holder:
            raise MoveRefused(f"GPU {gpu} is not in the cluster, which has {len(self._holder)}: {self._told()}")
        return self._holder[gpu]

    def held_by(self, holder: Holder) -> tuple[GpuId, ...]:
        """In the cluster's order."""
        return tuple(gpu for gpu, has in self._holder.items() if has is holder)

    def move(self, gpus: Iterable[GpuId], before: Holder, after: Holder, at_s: float) -> None:
        """All of them or, refused, none."""
        moved = tuple(gpus)
        if wrong := [f"{gpu} ({held})" for gpu in moved if (held := self.holder(gpu)) is not before]:
            raise MoveRefused(f"{', '.join(wrong)} cannot go from {before} to {after}: only what is {before} can")
        if len(set(moved)) < len(moved):
            raise MoveRefused(f"a GPU is named twice in {', '.join(moved)}: name each once")
        for gpu in moved:
            self._holder[gpu] = after
            self.changes.append(Change(at_s, gpu, after))
        self.mark(moved, _WHEN_HELD.get(after, Doing.SWITCHING), at_s)

    def mark(self, gpus: Iterable[GpuId], doing: Doing, at_s: float) -> None:
        """What they do from now on."""
        for gpu in gpus:
            marks = self.doings[gpu]
            if marks[-1][1] is not doing:
                marks.append((at_s, doing))

    def lose(self, gpu: GpuId, at_s: float) -> Holder:
        """The holder that it had."""
        before = self.holder(gpu)
        if before is not Holder.LOST:
            self.move([gpu], before, Holder.LOST, at_s)
        return before

    def _told(self) -> str:
        names = self.cluster
        return f"{names[0]} to {names[-1]}" if names else "none"
