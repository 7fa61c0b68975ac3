"""Chooses some of many GPUs: whole replicas inside a node, where they fit. Pure.

Invariants:
- A replica inside a node has GPUs that are consecutive in that node's part of the input.
  [test_units: units_are_inside_a_node_first]
- No GPU is in two replicas. [test_units: no_gpu_is_in_two_replicas]
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import groupby

from services.scheduler.state.layouts import replicas
from tidegate.types import GpuId, NodeId, node_of


def in_units(gpus: Iterable[GpuId], size: int, num_gpus: int, near: Set[NodeId] = frozenset()) -> tuple[GpuId, ...]:
    """`num_gpus` of these GPUs, or all if there are fewer, in replicas of `size` GPUs.

    1. Whole replicas inside a node, those on the nodes of `near` first.
    2. The remaining GPUs, across nodes.
    """
    if num_gpus <= 0:
        return ()
    pool = tuple(gpus)
    nodes = sorted(by_node(pool), key=lambda node: node_of(node[0]) not in near)
    whole = [gpu for node in nodes for each in replicas(node, size) for gpu in each][:num_gpus]
    return (*whole, *but_for(pool, whole)[: num_gpus - len(whole)])


def by_node(gpus: Iterable[GpuId]) -> list[tuple[GpuId, ...]]:
    """The GPUs of each node in their order, the nodes sorted by name."""
    ordered = sorted(gpus, key=node_of)
    return [tuple(each) for _, each in groupby(ordered, key=node_of)]


def but_for(gpus: Iterable[GpuId], others: Iterable[GpuId]) -> list[GpuId]:
    """`gpus` without `others`, in the order of `gpus`."""
    left_out = set(others)
    return [gpu for gpu in gpus if gpu not in left_out]
