"""The bytes that a reshard of the simulated trainer moves, from the plan that the elastic trainer would carry out.

A GPU is a member of the job's epoch throughout, even on standby (`services.actor.two_phase_resize`). A GPU in both
layouts keeps its shards, whatever its ranks. Holders on the same host serve first.

The bytes are those of `Planner.whole` for the busiest rank. Plans are cached by all that they depend on: the model,
both layouts, the old rank of each new rank, and the ranks on each host. A search that repeats a resize on other GPUs
plans it once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from simulator.cost_model import busiest_bytes
from simulator.model import ModelSection
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import StateTensor
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.plan.ranges import with_optimizer
from tidegate.types import GpuId, Layout, node_of

Name = TypeVar("Name", bound=Hashable)

KEPT = 4096
"""The number of cached plans. One takes some 0.1 s for a 7B model on 64 GPUs."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the trainer's layout.

    Members are numbered: those of the source by rank, then the joining ones in the target's order. `target_ranks` has
    the number of each rank of the target. `hosts` has the host of each member, numbered by first occurrence.
    """

    source: Layout
    target: Layout
    target_ranks: tuple[int, ...]
    hosts: tuple[int, ...]


def change_of(before: tuple[GpuId, ...], source: Layout, after: tuple[GpuId, ...], target: Layout) -> Change:
    """The change between two layouts, with their GPUs in rank order."""
    rank_of = _numbered((*before, *after))
    host_of = _numbered(node_of(gpu) for gpu in rank_of)
    hosts = tuple(host_of[node_of(gpu)] for gpu in rank_of)
    return Change(source, target, tuple(rank_of[gpu] for gpu in after), hosts)


def moved_bytes(model: ModelSection, change: Change) -> int:
    """The bytes of the busiest rank. LayoutRefused: a layout cannot hold the model."""
    return _planned(model.shape(), model.states, change)


@lru_cache(maxsize=KEPT)
def _planned(shape: GptShape, states: tuple[StateTensor, ...], change: Change) -> int:
    parameters = gpt_parameters(shape)

    def end(layout: Layout, ranks: tuple[int, ...]) -> State:
        mesh = Mesh(layout, ranks, even_chunks(shape.num_layers, pp=layout.pp, vpp=layout.vpp))
        # FusedAdam, which GPUs have, keeps its step in its parameter groups.
        return with_optimizer(parameters, mesh, states=states, step_itemsize=None)

    source = end(change.source, tuple(range(change.source.num_ranks)))
    target = end(change.target, change.target_ranks)
    hosts = {rank: str(host) for rank, host in enumerate(change.hosts)}
    return busiest_bytes(Planner(parameters, source, target, hosts=hosts).bytes_by_rank().values())


def _numbered(names: Iterable[Name]) -> dict[Name, int]:
    """Number the names by their first occurrence."""
    numbers: dict[Name, int] = {}
    for name in names:
        numbers.setdefault(name, len(numbers))
    return numbers
