"""Plans a reshard: from parameters and two layouts on ranks, source and target, to a frozen plan.

It is pure: the same input gives the same plan.

1. For each slot of each parameter, both ends are described as cells: which ranks hold or need which region.
2. An exchange between the cells decides which rank sends what. A rank copies locally what it already holds. Other
   regions come from the same host where possible, else from another. The holders of a region serve in turns.

So each byte moves once to each rank that needs it and does not hold it, which is the minimum.

The time for one rank's part depends on its own parameters and copies, not on the number of ranks. Uniform slots of one
cut and place share one exchange, and an exchange computes only what the rank takes part in.

Invariants:
- `part(rank)` equals `whole().part(rank)`. [test_planner: a_rank_alone_plans_exactly]
- The order of the listed copies is a function of the copies and hosts alone. [test_planner: a_rank_alone_plans_exactly]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tidegate.elastic.plan.exchange import Exchange, Transfer
from tidegate.elastic.plan.holders import Group, Holders, RangesRefused, Slot, State
from tidegate.elastic.plan.layout import LayoutRefused
from tidegate.elastic.plan.optimizers import Optimizer, StateKind, StateTensor
from tidegate.elastic.plan.parameters import Cut, Parameter, Whole
from tidegate.elastic.plan.plan import Holding, Part, Plan, RegionCopy


class _Move(NamedTuple):
    """One slot of one parameter."""

    parameter: Parameter
    slot: Slot
    source: Group
    target: Group
    exchange: Exchange
    turn: int


class RankTraffic(NamedTuple):
    """The bytes that one rank sends to others and receives from them."""

    sent_bytes: int
    received_bytes: int


_UniformKey = tuple[Group, Group, tuple[int, ...], Cut]


class Planner:
    """Plans one reshard, whole or one rank's part at a time.

    `hosts` names the host of each world rank; without it all ranks are on one host. `lost` ranks of the source hold
    nothing any more. Raises LayoutRefused, RangesRefused, SourceMissing or ValueError where no plan exists.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        source: State,
        target: State,
        *,
        hosts: Mapping[int, str] | None = None,
        lost: frozenset[int] = frozenset(),
    ) -> None:
        if back := lost.intersection(target.mesh.ranks):
            raise LayoutRefused(f"ranks {sorted(back)} are lost, and the target layout has them: leave them out")
        _check_states(source.optimizer, target.optimizer)
        self._parameters = tuple(parameters)
        if len({parameter.name for parameter in self._parameters}) != len(self._parameters):
            raise ValueError(f"two of the {len(self._parameters)} parameters have the same name: each needs its own")
        self._hosts = hosts or {}
        self._ranks = sorted({*source.mesh.ranks, *target.mesh.ranks} - lost)
        self._source = Holders(source, lost=lost)
        self._target = Holders(target)
        self._groups = [(self._source.group(p), self._target.group(p)) for p in self._parameters]
        self._uniform: dict[_UniformKey, Exchange] = {}

    def part(self, rank: int) -> Part:
        """One rank's part, computed alone."""
        if rank not in self._ranks:
            raise ValueError(f"rank {rank} is in neither layout; the ranks are {self._ranks}")
        arriving: list[RegionCopy] = []
        leaving: list[RegionCopy] = []
        for move in self._moves(rank):
            for transfer in move.exchange.arriving(rank, move.turn):
                arriving += self._copies(move, transfer)
            for transfer in move.exchange.leaving(rank, move.turn):
                leaving += self._copies(move, transfer)
        return self._assembled(rank, arriving, leaving)

    def whole(self) -> Plan:
        """Every rank's part. A rank's sends are taken from the receives of the others."""
        arriving: defaultdict[int, list[RegionCopy]] = defaultdict(list)
        leaving: defaultdict[int, list[RegionCopy]] = defaultdict(list)
        for move in self._moves(None):
            for rank in sorted(self._target.members(move.target)):
                for transfer in move.exchange.arriving(rank, move.turn):
                    copies = self._copies(move, transfer)
                    arriving[rank] += copies
                    if transfer.source != rank:
                        leaving[transfer.source] += copies
        return Plan(tuple(self._assembled(rank, arriving[rank], leaving[rank]) for rank in self._ranks))

    def bytes_by_rank(self) -> dict[int, RankTraffic]:
        """The bytes of the parts of the whole plan, counted without listing the copies."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for move in self._moves(None):
            itemsize = sum(tensor.itemsize for tensor in self._target.tensors(move.parameter, move.slot))
            for rank in self._target.members(move.target):
                for transfer in move.exchange.arriving(rank, move.turn):
                    if transfer.source != rank:
                        size_bytes = itemsize * sum(box.rows * box.cols for box in transfer.boxes)
                        sent[transfer.source] += size_bytes
                        received[rank] += size_bytes
        return {rank: RankTraffic(sent[rank], received[rank]) for rank in self._ranks}

    def _moves(self, rank: int | None) -> Iterator[_Move]:
        """All slots in which the rank takes part, in order of the parameters; None for all slots."""
        turns: defaultdict[tuple[_UniformKey, Slot], int] = defaultdict(int)
        for ordinal, (parameter, (source, target)) in enumerate(zip(self._parameters, self._groups, strict=True)):
            holds = rank is None or rank in self._source.members(source)
            wants = rank is None or rank in self._target.members(target)
            if not holds and not wants:
                continue
            for slot in self._target.slots(parameter):
                if self._source.is_uniform(slot) and self._target.is_uniform(slot):
                    shape, cut = ((1,), Whole()) if slot is Slot.STEP else (parameter.shape, parameter.cut)
                    key = (source, target, shape, cut)
                    yield _Move(parameter, slot, source, target, self._uniform_exchange(key), turns[key, slot])
                    turns[key, slot] += 1
                elif (
                    rank is None
                    or (holds and self._source.has(parameter, slot, rank))
                    or (wants and self._target.has(parameter, slot, rank))
                ):
                    exchange = self._state_exchange(parameter, slot, source, target)
                    yield _Move(parameter, slot, source, target, exchange, ordinal)

    def _uniform_exchange(self, key: _UniformKey) -> Exchange:
        """The exchange of all parameters with this key. A rank that takes part in one takes part in all, and counts
        their turns.
        """
        if key not in self._uniform:
            source, target, shape, cut = key
            self._uniform[key] = Exchange(
                self._source.uniform_cells(source, shape, cut),
                self._target.uniform_cells(target, shape, cut),
                self._hosts,
            )
        return self._uniform[key]

    def _state_exchange(self, parameter: Parameter, slot: Slot, source: Group, target: Group) -> Exchange:
        if slot is Slot.STEP:
            cells = self._source.step_cells(parameter, source), self._target.step_cells(parameter, target)
        else:
            cells = (
                self._source.source_state_cells(parameter, source),
                self._target.target_state_cells(parameter, target),
            )
        return Exchange(*cells, self._hosts)

    def _copies(self, move: _Move, transfer: Transfer) -> list[RegionCopy]:
        parameter, slot = move.parameter, move.slot
        source_start = self._source.start(parameter, slot, transfer.source)
        target_start = self._target.start(parameter, slot, transfer.target)
        return [
            RegionCopy(
                parameter.name,
                tensor.kind,
                tensor.itemsize,
                transfer.source,
                transfer.target,
                box.row,
                box.col,
                box.rows,
                box.cols,
                box.source_offset - source_start,
                box.source_stride,
                box.target_offset - target_start,
                box.target_stride,
            )
            for tensor in self._target.tensors(parameter, slot)
            for box in transfer.boxes
        ]

    def _assembled(self, rank: int, arriving: Iterable[RegionCopy], leaving: Iterable[RegionCopy]) -> Part:
        arriving = sorted(arriving, key=self.copy_order)
        return Part(
            rank=rank,
            source_holdings=self._holdings(self._source, [source for source, _ in self._groups], rank),
            target_holdings=self._holdings(self._target, [target for _, target in self._groups], rank),
            local=tuple(copy for copy in arriving if copy.source_rank == rank),
            sends=tuple(sorted(leaving, key=self.copy_order)),
            receives=tuple(copy for copy in arriving if copy.source_rank != rank),
        )

    def copy_order(self, copy: RegionCopy) -> tuple[bool, int, int, str, str, int, int]:
        """Same host first, then other hosts; then by the pair of ranks, by tensor and by place."""
        far = self._hosts.get(copy.source_rank, "") != self._hosts.get(copy.target_rank, "")
        return far, copy.source_rank, copy.target_rank, copy.name, copy.kind, copy.row, copy.col

    def _holdings(self, holders: Holders, groups: Iterable[Group], rank: int) -> tuple[Holding, ...]:
        """All tensors of a rank at one end.

        Raises RangesRefused when the rank's ranges name a parameter that it cannot have.
        """
        found: list[Holding] = []
        for parameter, group in zip(self._parameters, groups, strict=True):
            if rank in holders.members(group):
                for slot in holders.slots(parameter):
                    if holders.has(parameter, slot, rank):
                        found += holders.holdings(parameter, slot, rank)
        trained = {holding.name for holding in found if holding.kind is not StateKind.WEIGHT}
        if strange := holders.names_with_ranges(rank) - trained:
            raise RangesRefused(
                f"rank {rank} has optimizer ranges of {len(strange)} parameters that it does not train, such as "
                f"{min(strange)}: ranges go by logical name, with the layer's and the expert's global numbers"
            )
        return tuple(found)


def _check_states(source: Optimizer | None, target: Optimizer | None) -> None:
    """Both ends must keep the same tensors. A target without an optimizer takes the weights alone."""
    if target is None:
        return
    target_states: tuple[tuple[StateTensor, ...], int | None] = (target.states, target.step_itemsize)
    source_states = None if source is None else (source.states, source.step_itemsize)
    if source_states != target_states:
        raise ValueError(
            f"the target's optimizer keeps {target_states}, and the source's keeps {source_states}: a reshard converts "
            "nothing, so both must keep the same"
        )
