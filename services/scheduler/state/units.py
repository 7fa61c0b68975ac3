"""Which of many GPUs to take: whole replicas inside a node, as far as they fit. Pure.

Invariant: a replica's GPUs are consecutive in the order given, and none is in two replicas.
[test_units: units_are_inside_a_node_first]
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import groupby

from services.scheduler.state.layouts import replicas
from tidegate.types import GpuId, NodeId, node_of


def in_units(gpus: Iterable[GpuId], size: int, num_gpus: int, near: Set[NodeId] = frozenset()) -> tuple[GpuId, ...]:
    """So many of these GPUs, or all of them, in replicas of `size`: first whole replicas inside a node, those of `near`
    before others, then the remaining GPUs across nodes."""
    if num_gpus <= 0:
        return ()
    pool = tuple(gpus)
    nodes = sorted(by_node(pool), key=lambda node: node_of(node[0]) not in near)
    whole = [gpu for node in nodes for each in replicas(node, size) for gpu in each][:num_gpus]
    return (*whole, *but_for(pool, whole)[: num_gpus - len(whole)])


def by_node(gpus: Iterable[GpuId]) -> list[tuple[GpuId, ...]]:
    """Nodes by name, the GPUs of each in the order given."""
    ordered = sorted(gpus, key=node_of)
    return [tuple(each) for _, each in groupby(ordered, key=node_of)]


def but_for(gpus: Iterable[GpuId], others: Iterable[GpuId]) -> list[GpuId]:
    """The GPUs in their order, without the others."""
    left_out = set(others)
    return [gpu for gpu in gpus if gpu not in left_out]
