"""A plan as a frozen value: which region of which tensor goes from which rank to which. It is checked when it is made.

- A copy names a box of the logical parameter and where both ends have it in flat storage.
- A Part is all that one rank does.
- A Plan is the parts of all ranks.

Invariants of a Part:
- Every logical element that the rank needs arrives exactly once, at its place. [test_plan: an_invalid_plan_is_refused]
- The rank holds what it sends, at that place. [test_plan: an_invalid_plan_is_refused]
- Local copies stay on the rank, and no send or receive is to itself. [test_plan: an_invalid_plan_is_refused]

Invariants of a Plan:
- It has one part per rank, and the sends equal the receives. [test_plan: an_invalid_plan_is_refused]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.regions import Block, first_clash, overlaps_of


class PlanInvalid(ValueError):
    """A plan would lose, double or misplace elements. The fault is the planner's, never the layout's."""


class RegionCopy(NamedTuple):
    """`rows` by `cols` elements of the logical matrix from (row, col).

    Offsets and strides count elements of the tensor that the rank holds. For a rank's share of a distributed optimizer
    they count from the beginning of the share.
    """

    name: str
    kind: StateKind
    itemsize: int
    source_rank: int
    target_rank: int
    row: int
    col: int
    rows: int
    cols: int
    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int

    @property
    def num_elements(self) -> int:
        return self.rows * self.cols

    @property
    def size_bytes(self) -> int:
        return self.rows * self.cols * self.itemsize


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor of a rank, with `num_elements` in flat storage. Elements in no block are padding."""

    name: str
    kind: StateKind
    itemsize: int
    num_elements: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The work of one rank. Local copies come first. Sends and receives are in the order of `Planner.copy_order`."""

    rank: int
    source_holdings: tuple[Holding, ...]
    target_holdings: tuple[Holding, ...]
    local: tuple[RegionCopy, ...]
    sends: tuple[RegionCopy, ...]
    receives: tuple[RegionCopy, ...]

    def __post_init__(self) -> None:
        self._check_ends()
        sources, expected = _by_tensor(self.source_holdings), _by_tensor(self.target_holdings)
        for copy in (*self.local, *self.sends):
            _check_place(copy, sources, copy.source_offset, copy.source_stride, "holds")
        arriving: defaultdict[tuple[str, StateKind], list[RegionCopy]] = defaultdict(list)
        for copy in (*self.local, *self.receives):
            _check_place(copy, expected, copy.target_offset, copy.target_stride, "needs")
            arriving[copy.name, copy.kind].append(copy)
        for key, holding in expected.items():
            self._check_complete(holding, arriving.get(key, []))

    def _check_ends(self) -> None:
        """Check the sender and receiver of each copy."""
        for what, copies, sends, receives in (
            ("local copy", self.local, True, True),
            ("send", self.sends, True, False),
            ("receive", self.receives, False, True),
        ):
            for copy in copies:
                if (copy.source_rank == self.rank, copy.target_rank == self.rank) != (sends, receives):
                    raise PlanInvalid(
                        f"{what} of rank {self.rank} goes from rank {copy.source_rank} to rank {copy.target_rank}: "
                        f"{copy.name} {copy.kind}"
                    )

    def _check_complete(self, holding: Holding, copies: list[RegionCopy]) -> None:
        """Every element of the target must arrive exactly once: as many as are needed, none of them twice."""
        want = sum(block.num_elements for block in holding.blocks)
        got = sum(copy.num_elements for copy in copies)
        clash = first_clash((copy.row, copy.col, copy.rows, copy.cols) for copy in copies)
        if got != want or clash is not None:
            raise PlanInvalid(
                f"rank {self.rank} needs {want} elements of {holding.name} {holding.kind} and gets {got}"
                + ("" if clash is None else f", row {clash[0]} column {clash[1]} twice")
            )

    @property
    def received_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self.receives)

    @property
    def sent_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self.sends)

    @property
    def local_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self.local)

    @property
    def minimum_bytes(self) -> int:
        """The bytes that the rank needs and did not hold, counted from its holdings and not from the copies."""
        sources = {(holding.name, holding.kind): holding.blocks for holding in self.source_holdings}
        missing = 0
        for want in self.target_holdings:
            num_elements = sum(block.num_elements for block in want.blocks)
            kept = overlaps_of(sources.get((want.name, want.kind), ()), want.blocks)
            missing += (num_elements - sum(box.rows * box.cols for box in kept)) * want.itemsize
        return missing


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of all ranks, in order of their ranks."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        ranks = [part.rank for part in self.parts]
        if ranks != sorted(set(ranks)):
            raise PlanInvalid(f"a plan has one part per rank, in order of the ranks, got {ranks}")
        sent = Counter(copy for part in self.parts for copy in part.sends)
        received = Counter(copy for part in self.parts for copy in part.receives)
        if sent != received:
            copy = next(iter((sent - received) + (received - sent)))
            raise PlanInvalid(
                f"{copy.name} {copy.kind}: sent {sent[copy]} and received {received[copy]} times from rank "
                f"{copy.source_rank} to rank {copy.target_rank}"
            )

    def part(self, rank: int) -> Part:
        for part in self.parts:
            if part.rank == rank:
                return part
        raise ValueError(f"rank {rank} is in no layout of this plan; its ranks: {[part.rank for part in self.parts]}")

    @property
    def received_bytes(self) -> int:
        return sum(part.received_bytes for part in self.parts)


_Tensors = dict[tuple[str, StateKind], Holding]


def _by_tensor(holdings: Iterable[Holding]) -> _Tensors:
    return {(holding.name, holding.kind): holding for holding in holdings}


def _check_place(copy: RegionCopy, tensors: _Tensors, offset: int, stride: int, verb: str) -> None:
    """The copy's box must lie in one block of the tensor, at the address that the copy names."""
    holding = tensors.get((copy.name, copy.kind))
    blocks = () if holding is None or holding.itemsize != copy.itemsize else holding.blocks
    for block in blocks:
        row, col = copy.row - block.row, copy.col - block.col
        inside = 0 <= row <= block.rows - copy.rows and 0 <= col <= block.cols - copy.cols
        if inside and (offset, stride) == (block.offset + row * block.stride + col, block.stride):
            return
    rank = copy.source_rank if verb == "holds" else copy.target_rank
    raise PlanInvalid(
        f"rank {rank} {verb} no {copy.rows} x {copy.cols} elements of {copy.name} {copy.kind} "
        f"({copy.itemsize} bytes each) at offset {offset}, stride {stride}"
    )
