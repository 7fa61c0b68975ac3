"""Which ranks of a layout hold which regions of a parameter's tensors: weights, optimizer state, step.

- A parameter has three slots: its weights; its optimizer state, whose tensors all have the same shape; and its step.
- Weights, and the state of a plain optimizer, are the same for all replicas of a shard, and for every parameter with
  the same cut and place. Such a slot is uniform.
- The slots of a distributed optimizer are read from its ranges, parameter by parameter.

Invariants:
- The source's cells of one tensor are disjoint and cover it. [test_holders: source_cells_are_disjoint]
- A target's ranges cover each of its shards once. [test_planner: target_ranges_that_do_not_cover]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from tidegate.elastic.plan.exchange import Cell
from tidegate.elastic.plan.layout import Coordinates, Edge, LayoutRefused, Mesh, Place
from tidegate.elastic.plan.optimizers import DistributedOptimizer, FlatRange, Optimizer, StateKind, StateTensor
from tidegate.elastic.plan.parameters import Cut, Parameter, Shard, Whole, num_shards, shard_of
from tidegate.elastic.plan.plan import Holding
from tidegate.elastic.plan.regions import Block, blocks_of


class SourceMissing(ValueError):
    """No living rank holds a part of the state. The message names the parameter and the elements."""


class RangesRefused(ValueError):
    """The flat ranges do not belong to a distributed optimizer over these parameters in this layout."""


class Slot(Enum):
    WEIGHT = auto()
    STATE = auto()
    STEP = auto()


@dataclass(frozen=True, slots=True)
class State:
    """One end of a reshard: a layout on ranks, and its optimizer state; None: weights alone."""

    mesh: Mesh
    optimizer: Optimizer | None = None


class Group(NamedTuple):
    """The ranks that share a parameter's shards: the ranks of these stages with this ep coordinate; None: any."""

    stages: tuple[int, ...]
    ep: int | None


class _Owned(NamedTuple):
    range: FlatRange
    rank: int
    at: Coordinates


_STEP_SHAPE: tuple[tuple[int, ...], Cut] = ((1,), Whole())


class Holders:
    """One end of a reshard, as cells. `lost` ranks hold nothing any more."""

    def __init__(self, state: State, *, lost: frozenset[int] = frozenset()) -> None:
        self._mesh = state.mesh
        self._optimizer = state.optimizer
        self._lost = lost
        self._ranges = state.optimizer.ranges if isinstance(state.optimizer, DistributedOptimizer) else None
        self._stages = _stages_by_place(state.mesh)
        self._groups: dict[tuple[int, ...], dict[int | None, Group]] = {stages: {} for stages in self._stages.values()}
        self._at = {rank: state.mesh.coordinates(index) for index, rank in enumerate(state.mesh.ranks)}
        self._members: dict[Group, frozenset[int]] = {}
        self._blocks: dict[tuple[tuple[int, ...], Cut, int], tuple[Shard, tuple[Block, ...]]] = {}
        self._owned: dict[int, dict[str, list[_Owned]]] = {}

    def group(self, parameter: Parameter) -> Group:
        """Raises LayoutRefused when the layout has no such layer, or cannot divide the experts evenly."""
        ep = None if parameter.expert is None else parameter.expert.ep_rank(self._mesh.layout.ep)
        stages = self._stages.get(parameter.place)
        if stages is None:
            raise LayoutRefused(
                f"{parameter.name} is of layer {parameter.place}; the stages {self._mesh.chunks} hold "
                f"{self._mesh.num_layers} layers: make their sum the model's number of layers"
            )
        groups = self._groups[stages]
        if ep not in groups:
            groups[ep] = Group(stages, ep)
        return groups[ep]

    def members(self, group: Group) -> frozenset[int]:
        if group not in self._members:
            self._members[group] = frozenset(self._ranks(group, tp=None))
        return self._members[group]

    def slots(self, parameter: Parameter) -> tuple[Slot, ...]:
        if self._optimizer is None or not parameter.trainable:
            return (Slot.WEIGHT,)
        return tuple(Slot) if self._optimizer.step_itemsize else (Slot.WEIGHT, Slot.STATE)

    def is_uniform(self, slot: Slot) -> bool:
        return slot is Slot.WEIGHT or self._ranges is None

    def tensors(self, parameter: Parameter, slot: Slot) -> tuple[StateTensor, ...]:
        """The tensors of a slot. Raises ValueError where this end keeps none."""
        if slot is Slot.WEIGHT:
            return (StateTensor(StateKind.WEIGHT, parameter.itemsize),)
        if self._optimizer is None:
            raise ValueError(f"{parameter.name}: this end keeps no optimizer state")
        if slot is Slot.STATE:
            return self._optimizer.states
        return (StateTensor(StateKind.STEP, self._optimizer.step_itemsize or 0),)

    def has(self, parameter: Parameter, slot: Slot, rank: int) -> bool:
        """Whether a member of the parameter's group has a tensor in the slot."""
        if self.is_uniform(slot) or self._ranges is None:
            return True
        start, end = self._ranges.get(rank, {}).get(parameter.name, FlatRange(0, 0))
        return start < end

    def start(self, parameter: Parameter, slot: Slot, rank: int) -> int:
        """The position in its shard at which the rank's tensor begins."""
        if slot is not Slot.STATE or self._ranges is None:
            return 0
        return self._ranges[rank][parameter.name].start

    def names_with_ranges(self, rank: int) -> frozenset[str]:
        shares = {} if self._ranges is None else self._ranges.get(rank, {})
        return frozenset(name for name, (start, end) in shares.items() if start < end)

    def holdings(self, parameter: Parameter, slot: Slot, rank: int) -> tuple[Holding, ...]:
        """The tensors that a rank has in the slot."""
        shape, cut = (parameter.shape, parameter.cut) if slot is not Slot.STEP else _STEP_SHAPE
        shard, blocks = self._whole_shard(shape, cut, min(self._at[rank].tp, num_shards(cut, self._mesh.layout.tp) - 1))
        num_elements = shard.num_elements
        if slot is Slot.STATE and self._ranges is not None:
            start, end = self._ranges[rank][parameter.name]
            num_elements = end - start
            blocks = tuple(block._replace(offset=block.offset - start) for block in blocks_of(shard, start, end))
        return tuple(
            Holding(parameter.name, tensor.kind, tensor.itemsize, num_elements, blocks)
            for tensor in self.tensors(parameter, slot)
        )

    def uniform_cells(self, group: Group, shape: tuple[int, ...], cut: Cut) -> tuple[Cell, ...]:
        """One cell per shard, in order of the tp ranks. Raises SourceMissing where every holder of a shard is lost."""
        cells: list[Cell] = []
        for tp_rank in range(num_shards(cut, self._mesh.layout.tp)):
            ranks = self._ranks(group, tp=None if isinstance(cut, Whole) else tp_rank)
            if not ranks:
                raise SourceMissing(
                    f"shard {tp_rank} of {shape} on stage(s) {group.stages}: all its holders are lost; return to "
                    "the checkpoint"
                )
            cells.append(Cell(ranks, self._whole_shard(shape, cut, tp_rank)[1]))
        return tuple(cells)

    def step_cells(self, parameter: Parameter, group: Group) -> tuple[Cell, ...]:
        """One cell: all ranks with state of the parameter hold the same step."""
        if self._ranges is None:
            return self.uniform_cells(group, *_STEP_SHAPE)
        ranks = tuple(owned.rank for owned in self._owners(parameter, group))
        if not ranks:
            raise SourceMissing(f"{parameter.name}: no rank holds a part of its optimizer state")
        return (Cell(ranks, self._whole_shard(*_STEP_SHAPE, 0)[1]),)

    def source_state_cells(self, parameter: Parameter, group: Group) -> tuple[Cell, ...]:
        """For a source: the shards, cut wherever a range begins or ends. Raises SourceMissing on a gap."""
        if self._ranges is None:
            return self.uniform_cells(group, parameter.shape, parameter.cut)
        cells: list[Cell] = []
        for shard, _, owners in self._owners_by_shard(parameter, group):
            for start, end, ranks in _segments(owners, shard.num_elements):
                blocks = blocks_of(shard, start, end)
                if not ranks and blocks:
                    raise SourceMissing(
                        f"{parameter.name}: no rank holds elements {start} to {end} of a shard's optimizer state; "
                        "pass the ranges of a rank with a copy, or return to the checkpoint"
                    )
                if blocks:
                    cells.append(Cell(ranks, blocks))
        return tuple(cells)

    def target_state_cells(self, parameter: Parameter, group: Group) -> tuple[Cell, ...]:
        """For a target: one cell per rank. Raises RangesRefused unless each shard's ranges follow each other."""
        if self._ranges is None:
            return self.uniform_cells(group, parameter.shape, parameter.cut)
        cells: list[Cell] = []
        for shard, tp_ranks, owners in self._owners_by_shard(parameter, group):
            for stage in group.stages:
                for tp_rank in tp_ranks:
                    shares = [owned.range for owned in owners if (owned.at.stage, owned.at.tp) == (stage, tp_rank)]
                    _check_shares(f"{parameter.name}, stage {stage}, tp rank {tp_rank}", shares, shard.num_elements)
            cells += [Cell((owned.rank,), blocks_of(shard, *owned.range)) for owned in owners]
        return tuple(cells)

    def _owners_by_shard(self, parameter: Parameter, group: Group) -> Iterable[tuple[Shard, range, list[_Owned]]]:
        """Each different shard, the tp ranks that have it, and the owners of its ranges."""
        owners = self._owners(parameter, group)
        if isinstance(parameter.cut, Whole):
            yield self._whole_shard(parameter.shape, parameter.cut, 0)[0], range(self._mesh.layout.tp), owners
            return
        by_column: list[list[_Owned]] = [[] for _ in range(self._mesh.layout.tp)]
        for owned in owners:
            by_column[owned.at.tp].append(owned)
        for tp_rank, column in enumerate(by_column):
            shard, _ = self._whole_shard(parameter.shape, parameter.cut, tp_rank)
            yield shard, range(tp_rank, tp_rank + 1), column

    def _owners(self, parameter: Parameter, group: Group) -> list[_Owned]:
        """The owners in mesh order, stage by stage."""
        return [owned for stage in group.stages for owned in self._ranges_of_stage(stage).get(parameter.name, ())]

    def _ranges_of_stage(self, stage: int) -> dict[str, list[_Owned]]:
        assert self._ranges is not None
        if stage not in self._owned:
            found: dict[str, list[_Owned]] = {}
            for rank in self._ranks(Group((stage,), None), tp=None):
                at = self._at[rank]
                for name, share in self._ranges.get(rank, {}).items():
                    if share.start < share.end:
                        found.setdefault(name, []).append(_Owned(share, rank, at))
            self._owned[stage] = found
        return self._owned[stage]

    def _ranks(self, group: Group, *, tp: int | None) -> tuple[int, ...]:
        ranks = (rank for stage in group.stages for rank in self._mesh.holders(stage, tp=tp, ep=group.ep))
        return tuple(rank for rank in ranks if rank not in self._lost)

    def _whole_shard(self, shape: tuple[int, ...], cut: Cut, tp_rank: int) -> tuple[Shard, tuple[Block, ...]]:
        key = (shape, cut, tp_rank)
        if key not in self._blocks:
            shard = shard_of(shape, cut, tp=self._mesh.layout.tp, tp_rank=tp_rank)
            self._blocks[key] = (shard, blocks_of(shard, 0, shard.num_elements))
        return self._blocks[key]


def _stages_by_place(mesh: Mesh) -> dict[Place, tuple[int, ...]]:
    last = mesh.layout.pp - 1
    stages: dict[Place, tuple[int, ...]] = {layer: (home.stage,) for layer, home in enumerate(mesh.homes())}
    return stages | {Edge.INPUT: (0,), Edge.OUTPUT: (last,), Edge.BOTH: (0, last) if last else (0,)}


def _segments(owners: list[_Owned], size: int) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """(start, end, ranks that own it) between any two neighbouring bounds of the ranges of a shard."""
    bounds = sorted({0, size}.union(*(owned.range for owned in owners)))
    for start, end in pairwise(bounds):
        yield start, end, tuple(o.rank for o in owners if o.range.start <= start and end <= o.range.end)


def _check_shares(whose: str, shares: list[FlatRange], size: int) -> None:
    """A data-parallel group must own the whole of its shard, each element once."""
    bounds = [0, *(bound for share in sorted(shares) for bound in share), size]
    if any(left != right for left, right in zip(bounds[::2], bounds[1::2], strict=True)):
        raise RangesRefused(
            f"{whose}: the ranges {[tuple(share) for share in sorted(shares)]} must follow each other from 0 to {size}"
        )
