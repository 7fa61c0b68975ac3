"""Decides which holder of a region serves which receiver: local copies first, then the same host, then other hosts.

- A cell is a region together with the ranks that hold the same of it.
- The source cells of one tensor are disjoint. So a rank in a source cell copies that cell's part of its target locally,
  and receives the rest.
- For each source cell, receivers on a host with holders are served by those holders in turns. The other receivers are
  served by all holders in turns.
- `turn` is the position at which the turns begin, so that each parameter continues where the last one stopped.

Invariant: in each of these lanes, over any run of consecutive turns, the numbers of regions that two holders serve
differ by at most one. [test_exchange: holders_serve_numbers_that_differ]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidegate.elastic.plan.regions import Block, Overlap, overlaps_of


@dataclass(frozen=True, slots=True)
class Cell:
    ranks: tuple[int, ...]
    blocks: tuple[Block, ...]


class Transfer(NamedTuple):
    """The boxes that `source` holds and `target` needs. Both are the same rank for a local copy."""

    source: int
    target: int
    boxes: tuple[Overlap, ...]


class _Receiver(NamedTuple):
    rank: int
    cell: int
    """The target cell for which the rank receives."""


class _Lane:
    """Sources that serve receivers in turns."""

    def __init__(self, sources: tuple[int, ...]) -> None:
        self.sources = sources
        self.receivers: list[_Receiver] = []

    def source_of(self, index: int, turn: int) -> int:
        return self.sources[(turn * len(self.receivers) + index) % len(self.sources)]

    def served_by(self, source: int, turn: int) -> list[_Receiver]:
        num_sources = len(self.sources)
        first = (self.sources.index(source) - turn * len(self.receivers)) % num_sources
        return self.receivers[first::num_sources]


class _Route:
    """The lanes of one source cell."""

    def __init__(self, sources: tuple[int, ...], receivers: list[_Receiver], hosts: Mapping[int, str]) -> None:
        self._places: dict[_Receiver, tuple[_Lane, int]] = {}
        near: dict[str, list[int]] = {}
        for source in sources:
            near.setdefault(hosts.get(source, ""), []).append(source)
        lane_of = {host: _Lane(tuple(ranks)) for host, ranks in near.items()}
        far = _Lane(sources)
        for receiver in receivers:
            lane = lane_of.get(hosts.get(receiver.rank, ""), far)
            self._places[receiver] = (lane, len(lane.receivers))
            lane.receivers.append(receiver)
        self.lanes = [lane for lane in (*lane_of.values(), far) if lane.receivers]

    def source_of(self, receiver: _Receiver, turn: int) -> int:
        lane, index = self._places[receiver]
        return lane.source_of(index, turn)

    def served_by(self, source: int, turn: int) -> Iterator[_Receiver]:
        for lane in self.lanes:
            if source in lane.sources:
                yield from lane.served_by(source, turn)


class Exchange:
    """The transfers from source cells to target cells. It computes only what is requested, and caches it."""

    def __init__(self, sources: tuple[Cell, ...], targets: tuple[Cell, ...], hosts: Mapping[int, str]) -> None:
        self._sources = sources
        self._targets = targets
        self._hosts = hosts
        self._boxes: dict[tuple[int, int], tuple[Overlap, ...]] = {}
        self._routes: dict[int, _Route] = {}
        self._sources_of = _cells_by_rank(sources)
        self._targets_of = _cells_by_rank(targets)

    def arriving(self, rank: int, turn: int) -> Iterator[Transfer]:
        """All transfers to `rank`, local copies too."""
        for target in self._targets_of.get(rank, ()):
            for source, cell in enumerate(self._sources):
                boxes = self._boxes_of(source, target)
                if boxes and source in self._sources_of.get(rank, ()):
                    yield Transfer(rank, rank, boxes)
                elif boxes and len(cell.ranks) == 1:
                    yield Transfer(cell.ranks[0], rank, boxes)
                elif boxes:
                    yield Transfer(self._route(source).source_of(_Receiver(rank, target), turn), rank, boxes)

    def leaving(self, rank: int, turn: int) -> Iterator[Transfer]:
        """All transfers from `rank` to other ranks."""
        for source in self._sources_of.get(rank, ()):
            for receiver in self._route(source).served_by(rank, turn):
                yield Transfer(rank, receiver.rank, self._boxes_of(source, receiver.cell))

    def _boxes_of(self, source: int, target: int) -> tuple[Overlap, ...]:
        key = (source, target)
        if key not in self._boxes:
            self._boxes[key] = overlaps_of(self._sources[source].blocks, self._targets[target].blocks)
        return self._boxes[key]

    def _route(self, source: int) -> _Route:
        if source not in self._routes:
            holders = self._sources[source].ranks
            receivers = [
                _Receiver(rank, target)
                for target, cell in enumerate(self._targets)
                if self._boxes_of(source, target)
                for rank in cell.ranks
                if source not in self._sources_of.get(rank, ())
            ]
            self._routes[source] = _Route(holders, receivers, self._hosts)
        return self._routes[source]


def _cells_by_rank(cells: tuple[Cell, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, cell in enumerate(cells):
        for rank in cell.ranks:
            found.setdefault(rank, []).append(index)
    return found
