"""GPUs in the units of a component: whole data-parallel copies, or engines, inside a node as far as they fit. Pure.

Invariants: a unit's GPUs are consecutive in the order given; none is in two units.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import groupby

from services.scheduler.state.layouts import as_engines
from tidegate.types import GpuId, NodeId, node_of


def in_units(gpus: Iterable[GpuId], unit: int, num_gpus: int, near: Set[NodeId] = frozenset()) -> tuple[GpuId, ...]:
    """So many of these GPUs, or all, unit by unit: whole units inside a node, those of `near` first; then what is left,
    across nodes."""
    if num_gpus <= 0:
        return ()
    pool = tuple(gpus)
    nodes = sorted(by_node(pool), key=lambda node: node_of(node[0]) not in near)
    whole = [gpu for node in nodes for each in as_engines(node, unit) for gpu in each][:num_gpus]
    return (*whole, *but_for(pool, whole)[: num_gpus - len(whole)])


def by_node(gpus: Iterable[GpuId]) -> list[tuple[GpuId, ...]]:
    """Nodes by name, the GPUs of each in the order given."""
    ordered = sorted(gpus, key=node_of)
    return [tuple(each) for _, each in groupby(ordered, key=node_of)]


def but_for(gpus: Iterable[GpuId], others: Iterable[GpuId]) -> list[GpuId]:
    """In their order."""
    left_out = set(others)
    return [gpu for gpu in gpus if gpu not in left_out]
