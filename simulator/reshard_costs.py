"""What a reshard of the simulated trainer moves: the bytes of the plan that the elastic trainer would carry out.

A GPU is one member of the job's epoch for as long as it lasts, standing by or not
(`services.actor.two_phase_resize`), so that who is in both layouts keeps its shards, wherever it stands in them;
holders on the same host serve first.
Plans are kept by what they depend on: the model, both layouts, which place of the old layout each rank of the new one
had, and which ranks share a host. A search that runs the same resizes on other GPUs plans them once.
Invariant: the bytes are those of `Planner.whole`, of the rank that sends or receives most.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from simulator.costs import busiest_bytes
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
"""Plans of which the bytes are remembered; one takes some 0.1 s to make for a 7B model on 64 GPUs."""


@dataclass(frozen=True, slots=True)
class Change:
    """Ranks by their place in the source, those that join after them, in the target's order; the host of each rank, by
    the order in which hosts occur."""

    source: Layout
    target: Layout
    target_ranks: tuple[int, ...]
    hosts: tuple[int, ...]


def change_of(before: tuple[GpuId, ...], source: Layout, after: tuple[GpuId, ...], target: Layout) -> Change:
    """GPUs in rank order."""
    rank_of = _numbered((*before, *after))
    host_of = _numbered(node_of(gpu) for gpu in rank_of)
    hosts = tuple(host_of[node_of(gpu)] for gpu in rank_of)
    return Change(source, target, tuple(rank_of[gpu] for gpu in after), hosts)


def moved_bytes(model: ModelSection, change: Change) -> int:
    """Of the busiest rank. Raises LayoutRefused for a model that cannot be cut so."""
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
    """By their first occurrence."""
    numbers: dict[Name, int] = {}
    for name in names:
        numbers.setdefault(name, len(numbers))
    return numbers
