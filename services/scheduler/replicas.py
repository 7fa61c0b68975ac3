"""What of a component's GPUs comes and goes together: an engine of the rollout, a copy of the inference. Pure.

Invariant: a rollout's or an inference's GPUs, in rank order, are whole replicas one after the other, in the state, in a
proposal and in what is asked.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.components import Component
from services.scheduler.values import Placed
from tidegate.types import GpuId, Grant, Layout

Replica = tuple[GpuId, ...]


def replicas(gpus: tuple[GpuId, ...], layout: Layout) -> tuple[Replica, ...]:
    size = layout.num_ranks // layout.dp
    return tuple(gpus[start : start + size] for start in range(0, len(gpus), size))


def replicas_of(component: Component) -> tuple[Replica, ...]:
    """Those that work."""
    return replicas(tuple(grant.gpu for grant in component.grants), component.layout) if component.layout else ()


def num_gpus(found: tuple[Replica, ...]) -> int:
    return sum(map(len, found))


def whole(component: Component, gone: set[Grant]) -> tuple[Grant, ...]:
    """The grants of the replicas that none of these is of."""
    dead = {grant.gpu for grant in gone}
    kept = {gpu for each in replicas_of(component) if not dead.intersection(each) for gpu in each}
    return tuple(grant for grant in component.grants if grant.gpu in kept)


def stays(component: Component, placed: Placed) -> tuple[Replica, ...]:
    """Which of its replicas it has where it is placed too, in whatever order of ranks; none where they are of another
    shape."""
    if component.layout is None or replace(component.layout, dp=1) != replace(placed.layout, dp=1):
        return ()
    own = replicas_of(component)
    if own == (there := replicas(placed.gpus, placed.layout)):
        return own
    wanted = {frozenset(each) for each in there}
    return tuple(each for each in own if frozenset(each) in wanted)


def comes(component: Component, placed: Placed) -> tuple[Replica, ...]:
    """Which of its replicas it lacks where it is placed, in rank order."""
    wanted = replicas(placed.gpus, placed.layout)
    if (stay := stays(component, placed)) == wanted:
        return ()
    there = {frozenset(each) for each in stay}
    return tuple(each for each in wanted if frozenset(each) not in there)


def in_rank_order(found: tuple[Replica, ...], placed: Placed) -> tuple[GpuId, ...]:
    """The replicas as they are placed, each in its own order."""
    rank = {gpu: index for index, gpu in enumerate(placed.gpus)}
    return tuple(
        gpu for each in sorted(found, key=lambda each: min(rank.get(gpu, len(rank)) for gpu in each)) for gpu in each
    )
