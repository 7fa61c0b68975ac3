"""Which torch world each worker of the inference is in, as its lead knows. Pure.

A copy's ranks stay in its world when they leave together. When the same ranks come back as a copy, in the same order,
they need only weights. In any other company they form a new world, which takes a rendezvous and a build.

A lead may know too little (a new lead knows of no world) or too much (a worker has died, and another runs on its slot):
in the first case a world is formed that exists, in the second a worker refuses a world that it is not in.

Invariants:
- A world's name is never used for another: it has its first member's token, or no token in a world of one standby.
  [test_worlds: name_of_a_world]
- Ranks share a world only if they formed it together and none has joined another since. [test_worlds: in_any_other]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidegate.types import GpuId, Grant


@dataclass(frozen=True, slots=True)
class CopyWorld:
    """`gpus` are in rank order."""

    name: str
    gpus: tuple[GpuId, ...]


class Worlds:
    def __init__(self) -> None:
        self._of: dict[GpuId, CopyWorld] = {}

    def of(self, gpu: GpuId) -> CopyWorld | None:
        """The world of the worker on this GPU. None: it is in none, as far as the lead knows."""
        return self._of.get(gpu)

    def shared_by(self, gpus: Sequence[GpuId]) -> CopyWorld | None:
        """The world whose ranks are these, in this order. None: they must form one."""
        world = self._of.get(gpus[0])
        is_whole = world is not None and world.gpus == tuple(gpus) and all(self._of.get(gpu) == world for gpu in gpus)
        return world if is_whole else None

    def form(self, grants: Sequence[Grant]) -> CopyWorld:
        """These workers, in rank order, leave their worlds and form a new one."""
        first = grants[0]
        world = CopyWorld(f"{first.gpu}@{first.token}", tuple(grant.gpu for grant in grants))
        self._of |= dict.fromkeys(world.gpus, world)
        return world

    def forget(self, gpus: Iterable[GpuId]) -> None:
        """The workers on these GPUs ended."""
        for gpu in gpus:
            self._of.pop(gpu, None)
