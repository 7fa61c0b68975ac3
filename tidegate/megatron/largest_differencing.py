"""Divides values into parts with even sums, by largest differencing (Karmarkar and Karp 1982). Pure.

1. Each row starts with one value per part.
2. The two rows whose sums differ most are joined: the dearest part of the one with the cheapest of the other.
3. Step 2 repeats until one row is left.

With equal numbers, a row starts with as many values as there are parts (Michiels, Korst, Aarts and van Leeuwen 2003).

Invariant: the same values give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def even_parts(values: Sequence[int], num_parts: int, *, equal_numbers: bool = False) -> list[list[int]]:
    """Indices of the values in each part.

    `equal_numbers`: parts have equal numbers of values, except that the last values may not suffice for all parts.
    """
    ranked = sorted(range(len(values)), key=lambda index: -values[index])
    step = num_parts if equal_numbers else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for count, first in enumerate(range(0, len(ranked), step)):
        row = [(values[index], [index]) for index in ranked[first : first + step]]
        row += [(0, [])] * (num_parts - len(row))
        heapq.heappush(heap, (row[-1][0] - row[0][0], count, row))
    count = len(heap)
    while len(heap) > 1:
        (_, _, dear), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        row = [(a + b, [*mine, *theirs]) for (a, mine), (b, theirs) in zip(dear, reversed(other), strict=True)]
        row.sort(key=lambda part: -part[0])
        count += 1
        heapq.heappush(heap, (row[-1][0] - row[0][0], count, row))
    return [indices for _, indices in heap[0][2]] if heap else [[] for _ in range(num_parts)]
