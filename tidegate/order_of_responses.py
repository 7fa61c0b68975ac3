"""What an order of groups says of their responses. Pure.

A group that is named once has all its responses there. One that is named twice has its first response at the first
place, and the others at the second: so one response of each group can come before all others, and tell how long these
will be. Groups that are not named come after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MOST_PLACES = 2
"""The most places of one group in an order."""


def responses_in(order: Sequence[int], group_size: int) -> Iterator[tuple[int, int]]:
    """(group, draw) of each response of the groups in `order`."""
    last = {group: place for place, group in enumerate(order)}
    named = set[int]()
    for place, group in enumerate(order):
        first = 1 if group in named else 0
        named.add(group)
        for draw in range(first, group_size if last[group] == place else 1):
            yield group, draw
