"""Values dealt into parts with even sums, by largest differencing (Karmarkar and Karp 1982). Pure.

The rows of one value a part are put together two at a time, those whose sums differ most first, the dearest of the one
with the cheapest of the other, until one row is left. With equal numbers, a row begins with as many values as there are
parts (Michiels, Korst, Aarts and van Leeuwen 2003). Invariant: the same values give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def differenced(values: Sequence[int], num_parts: int, *, equal_numbers: bool = False) -> list[list[int]]:
    """Indices of the values in each part. `equal_numbers`: no part has more than another but for the values that are
    missing in the end."""
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
