"""Replicas: GPUs of a component that come and go together, and the layouts that they make. Pure.

A replica is an engine of the rollout or a copy of the inference or the actor.

Invariant: the GPUs of the rollout and of the inference, in rank order, are whole replicas one after the other. This
holds in the state, in proposals and in commands. [test_moving: engines_of_several_gpus_move_whole]
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from services.scheduler.state.components import Component
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import GpuId, Grant, Layout, Role

Replica = tuple[GpuId, ...]
"""The GPUs of one replica, in rank order."""


@lru_cache(maxsize=64)  # a decision asks for the same ones several times
def replicas(gpus: tuple[GpuId, ...], size: int) -> tuple[Replica, ...]:
    """Replicas of `size` consecutive GPUs each. GPUs that do not fill the last one are left out."""
    return tuple(gpus[start : start + size] for start in range(0, len(gpus) - size + 1, size))


def replicas_of(component: Component) -> tuple[Replica, ...]:
    """The replicas that work."""
    if component.layout is None:
        return ()
    return replicas(tuple(grant.gpu for grant in component.grants), replica_size(component.layout))


def whole(component: Component, dead: set[Grant]) -> tuple[Grant, ...]:
    """The grants of the replicas that have none of these dead members."""
    lost = {grant.gpu for grant in dead}
    kept = {gpu for each in replicas_of(component) if not lost.intersection(each) for gpu in each}
    return tuple(grant for grant in component.grants if grant.gpu in kept)


def stays(component: Component, placed: Placed) -> tuple[Replica, ...]:
    """The replicas of the component that `placed` has too, in any order of ranks; none where their shapes differ."""
    if component.layout is None or replace(component.layout, dp=1) != replace(placed.layout, dp=1):
        return ()
    own = replicas_of(component)
    if own == (there := replicas(placed.gpus, replica_size(placed.layout))):
        return own
    wanted = {frozenset(each) for each in there}
    return tuple(each for each in own if frozenset(each) in wanted)


def comes(component: Component, placed: Placed) -> tuple[Replica, ...]:
    """The replicas of `placed` that the component lacks, in rank order."""
    wanted = replicas(placed.gpus, replica_size(placed.layout))
    if (stay := stays(component, placed)) == wanted:
        return ()
    there = {frozenset(each) for each in stay}
    return tuple(each for each in wanted if frozenset(each) not in there)


def in_rank_order(found: tuple[Replica, ...], placed: Placed) -> tuple[GpuId, ...]:
    """The GPUs of the replicas in the order of `placed`, each replica in its own order."""
    rank = {gpu: index for index, gpu in enumerate(placed.gpus)}
    return tuple(
        gpu for each in sorted(found, key=lambda each: min(rank.get(gpu, len(rank)) for gpu in each)) for gpu in each
    )


def engine_size(spec: JobSpec) -> int:
    """How many GPUs an engine has."""
    return replica_size(spec.placement[Role.ROLLOUT].layout)


def replica_size(layout: Layout) -> int:
    """How many GPUs one replica has."""
    return layout.num_ranks // layout.dp


def with_dp(layout: Layout, dp: int, *, num_shards: int | None = None) -> Layout | None:
    """The layout with `dp` data-parallel copies. `num_shards`: the logical shards of a reproducible actor.

    None where the layout's experts do not divide over the copies, or the copies do not divide the shards."""
    if dp < 1 or dp * layout.cp % layout.ep or (num_shards is not None and num_shards % dp):
        return None
    return replace(layout, dp=dp)


def most_copies(
    layout: Layout, gpus: tuple[GpuId, ...], *, most: int | None = None, num_shards: int | None = None
) -> Placed | None:
    """As many whole copies as these GPUs make, in their order, and at most `most`. The other GPUs get no rank. None
    where there is no layout for any number of copies."""
    size = replica_size(layout)
    num_copies = len(gpus) // size
    dp = largest_dp(layout, num_copies if most is None else min(num_copies, most), num_shards=num_shards)
    return Placed(gpus[: dp * size], replace(layout, dp=dp)) if dp else None


def largest_dp(layout: Layout, most: int, *, num_shards: int | None = None) -> int:
    """The largest number of data-parallel copies, at most `most`, that has a layout; 0 where none has."""
    return next((dp for dp in range(most, 0, -1) if with_dp(layout, dp, num_shards=num_shards)), 0)


def placed_gpus(spec: JobSpec) -> tuple[GpuId, ...]:
    """The GPUs of all components, in the order actor, rollout, inference. GPUs that stand by are left out."""
    return tuple(gpu for role in (Role.ACTOR, Role.ROLLOUT, Role.INFERENCE) for gpu in spec.placement[role].gpus)
