"""What of a component's GPUs comes and goes together: an engine of the rollout, a copy of the inference. Pure.

Invariant: a rollout's or an inference's GPUs, in rank order, are whole replicas one after the other, in the state, in a
proposal and in what is asked.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.state.components import Component
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Grant, Layout, Role

Replica = tuple[GpuId, ...]


def replicas(gpus: tuple[GpuId, ...], layout: Layout) -> tuple[Replica, ...]:
    size = layout.num_ranks // layout.dp
    return tuple(gpus[start : start + size] for start in range(0, len(gpus), size))


def replicas_of(component: Component) -> tuple[Replica, ...]:
    """Those that work."""
    return replicas(tuple(grant.gpu for grant in component.grants), component.layout) if component.layout else ()


def num_gpus(found: tuple[Replica, ...]) -> int:
    return sum(map(len, found))


def whole(component: Component, dead: set[Grant]) -> tuple[Grant, ...]:
    """The grants of the replicas that have none of these dead members."""
    lost = {grant.gpu for grant in dead}
    kept = {gpu for each in replicas_of(component) if not lost.intersection(each) for gpu in each}
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


def engine_size(spec: JobSpec) -> int:
    """GPUs of an engine."""
    return replica_size(spec.placement[Role.ROLLOUT].layout)


def replica_size(layout: Layout) -> int:
    """GPUs of one data-parallel copy."""
    return layout.num_ranks // layout.dp


def with_dp(layout: Layout, dp: int, *, num_shards: int | None = None) -> Layout | None:
    """The layout with so many data-parallel copies; None where its experts do not divide over them, or they do not
    divide `num_shards`, the logical shards of a reproducible actor."""
    if dp < 1 or dp * layout.cp % layout.ep or (num_shards is not None and num_shards % dp):
        return None
    return replace(layout, dp=dp)


def most_copies(
    layout: Layout, gpus: tuple[GpuId, ...], *, most: int | None = None, num_shards: int | None = None
) -> Placed | None:
    """As many whole copies as these GPUs make, in their order, and at most so many; the other GPUs would have no rank.
    None where there is no layout for any number of them."""
    size = replica_size(layout)
    num_copies = len(gpus) // size
    dp = largest_dp(layout, num_copies if most is None else min(num_copies, most), num_shards=num_shards)
    return Placed(gpus[: dp * size], replace(layout, dp=dp)) if dp else None


def largest_dp(layout: Layout, most: int, *, num_shards: int | None = None) -> int:
    """The most data-parallel copies, at most so many, that there is a layout for; 0 for none."""
    return next((dp for dp in range(most, 0, -1) if with_dp(layout, dp, num_shards=num_shards)), 0)


def as_engines(gpus: tuple[GpuId, ...], size: int) -> tuple[Replica, ...]:
    """Consecutive GPUs an engine; what does not fill the last one is left out."""
    return tuple(gpus[start : start + size] for start in range(0, len(gpus) - size + 1, size))


def placed_gpus(spec: JobSpec) -> tuple[GpuId, ...]:
    """Of all components, in the order actor, rollout, inference; those standing by are left out."""
    return tuple(gpu for role in (Role.ACTOR, Role.ROLLOUT, Role.INFERENCE) for gpu in spec.placement[role].gpus)
