"""The rule that packing is measured against: Karmarkar and Karp's differencing on sums of lengths, applied twice.

As verl deals a batch out and cuts it (`verl/utils/seqlen_balancing.py`; slime and SkyRL do likewise): samples go to
ranks in equal numbers with even sums of tokens; a rank's K is the largest number of caps that any rank's tokens fill;
each rank's samples go into K micro-batches with even sums. The rule knows no padding, so that right-padded its
micro-batches may be over the cap; with `keeps_cap`, K grows until none is. Written from the paper (1982).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tidegate.megatron.packing import TokenCap

Ranks = list[list[list[int]]]
"""Of each rank its micro-batches, as indices of samples."""


def differenced(values: Sequence[int], num_parts: int, *, equal_numbers: bool = False) -> list[list[int]]:
    """Indices of the values in each of so many parts with even sums."""
    order = sorted(range(len(values)), key=lambda index: -values[index])
    step = num_parts if equal_numbers else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for count, first in enumerate(range(0, len(order), step)):
        row = [(values[index], [index]) for index in order[first : first + step]]
        row += [(0, [])] * (num_parts - len(row))
        heapq.heappush(heap, (row[-1][0] - row[0][0], count, row))
    count = len(heap)
    while len(heap) > 1:
        (_, _, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        row = [(a + b, [*mine, *theirs]) for (a, mine), (b, theirs) in zip(left, reversed(right), strict=True)]
        row.sort(key=lambda part: -part[0])
        count += 1
        heapq.heappush(heap, (row[-1][0] - row[0][0], count, row))
    return [indices for _, indices in heap[0][2]]


def by_karmarkar_karp(lengths: Sequence[int], cap: TokenCap, *, num_ranks: int, keeps_cap: bool) -> Ranks:
    of_ranks = differenced(lengths, num_ranks, equal_numbers=True)
    num_batches = max(-(-sum(lengths[index] for index in of_rank) // cap.max_tokens) for of_rank in of_ranks)
    while True:
        packed = []
        for of_rank in of_ranks:
            parts = differenced([lengths[index] for index in of_rank], num_batches)
            packed.append([[of_rank[place] for place in part] for part in parts])
        is_kept = all(
            len(batch) <= 1 or positions(batch, lengths, cap) <= cap.max_tokens for own in packed for batch in own
        )
        if is_kept or not keeps_cap:
            return packed
        num_batches += 1


def positions(batch: Sequence[int], lengths: Sequence[int], cap: TokenCap) -> int:
    """Of a right-padded micro-batch; an empty one is run as a row of the least length."""
    return max(len(batch), 1) * max((cap.row_length(lengths[index]) for index in batch), default=cap.pad_multiple)


def waste(ranks: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], cap: TokenCap) -> float:
    """The share of all positions that are run and hold no token."""
    return 1 - sum(lengths) / sum(positions(batch, lengths, cap) for own in ranks for batch in own)
