"""Which layouts a policy may ask the actor for next, and which of them are worth building ahead. Pure.

A policy changes the number of the actor's copies, or their kind (`actor.layouts`), and picks their GPUs when the time
has come. It keeps the actor's own and adds GPUs that others let go of, or gives up the last ones. The order is by how
likely a layout is:
1. The actor's home: every policy returns to it.
2. By how near the number of copies is to the present one, of two the larger one first, each number once: on the
   actor's own GPUs first and then on the cluster's next ones.
3. In the same order of numbers, the other choices of further GPUs, in the cluster's order.

A suspended actor has no GPUs of its own; the order is that of its home, and each choice of GPUs is possible.

Memory, in bytes of one process:
- A layout is built if its tensors and all that is kept are within the cap together.
- The first one keeps its memory. The others keep theirs while half of the cap is left to build in.

Invariants:
- No process has more than the cap. [test_foreseen_layouts: never_more_than_the_cap]
- Each layout is one that the actor may be in, on its slots, each GPU once.
  [test_foreseen_layouts: only_layouts_on_slots]
- The same place gives the same order. [test_foreseen_layouts: in_order_of_their_likelihood]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from tidegate.types import GpuId, Layout

MOST_LAYOUTS = 12
"""How many layouts are built ahead. A layout of copies alone adds one group to each of its ranks, of at most 64, and a
build took 0.1 s on four CPU ranks with a small model. Four slots have 15 choices in all."""
_MOST_CHOICES = 256
"""The choices that are looked at. With many slots there are more than can be counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """A layout and its GPUs, in rank order."""

    layout: Layout
    gpus: tuple[GpuId, ...]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A layout to build ahead."""

    place: Place
    keeps_memory: bool


def foreseen(
    present: Place | None, home: Place, *, slots: Sequence[GpuId], layouts: Iterable[Layout]
) -> tuple[Place, ...]:
    """The places in order of their likelihood. `present`: None while the actor is suspended. `slots`: the GPUs that it
    may get, in the cluster's order. `layouts`: those that it may be in."""
    start = present or home

    def nearness(layout: Layout) -> tuple[int, int]:
        return abs(layout.num_ranks - start.layout.num_ranks), -layout.num_ranks

    by_nearness = sorted(layouts, key=nearness)[: MOST_LAYOUTS + 1]
    likely = [_on(layout, start, slots) for layout in by_nearness]
    own = () if present is None else present.gpus
    others = (place for layout in by_nearness for place in _choices(layout, own, slots))
    found = dict.fromkeys([home, *(place for place in likely if place), *islice(others, _MOST_CHOICES)])
    alive = set(slots)
    return tuple(place for place in found if place != present and alive.issuperset(place.gpus))[:MOST_LAYOUTS]


def within(places: Iterable[Place], *, cap_bytes: int, rank_bytes: Callable[[Layout], int]) -> tuple[Foreseen, ...]:
    """Those that are built, in their order. `rank_bytes`: the memory of one rank's tensors."""
    found: list[Foreseen] = []
    kept_bytes = 0
    for place in places:
        size_bytes = kept_bytes + rank_bytes(place.layout)
        if size_bytes <= cap_bytes:
            keeps_memory = not found or size_bytes <= cap_bytes // 2
            kept_bytes = size_bytes if keeps_memory else kept_bytes
            found.append(Foreseen(place, keeps_memory))
    return tuple(found)


def _on(layout: Layout, start: Place, slots: Sequence[GpuId]) -> Place | None:
    """On the first of the present GPUs, or on all of them and the next free ones. None without enough slots."""
    gpus = [*start.gpus, *(gpu for gpu in slots if gpu not in start.gpus)][: layout.num_ranks]
    return Place(layout, tuple(gpus)) if len(gpus) == layout.num_ranks else None


def _choices(layout: Layout, own: tuple[GpuId, ...], slots: Sequence[GpuId]) -> Iterator[Place]:
    """With all of the actor's own GPUs first, and any others."""
    others = [gpu for gpu in slots if gpu not in own]
    num_more = layout.num_ranks - len(own)
    if num_more > 0:
        yield from (Place(layout, (*own, *more)) for more in combinations(others, num_more))
