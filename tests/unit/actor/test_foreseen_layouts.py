"""Which layouts are built ahead, in which order, and which of them keep their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actor.foreseen_layouts import MOST_LAYOUTS, Foreseen, Place, foreseen, within
from tidegate.types import GpuId, Layout

SLOTS = tuple(GpuId(f"n0/{index}") for index in range(8))
PAIR = Layout(tp=2)


def on(*indices: int, layout: Layout | None = None) -> Place:
    layout = layout or Layout()
    size = layout.num_ranks // layout.dp
    return Place(replace(layout, dp=len(indices) // size), tuple(SLOTS[index] for index in indices))


def copies(*counts: int, of: Layout | None = None) -> list[Layout]:
    return [replace(of or Layout(), dp=dp) for dp in counts]


CASES: dict[str, tuple[Place | None, Place, int, list[Layout], list[Place]]] = {
    "a job at home grows by one copy, then more, then by other GPUs": (
        on(0),
        on(0),
        4,
        copies(1, 2, 3, 4),
        [on(0, 1), on(0, 1, 2), on(0, 1, 2, 3), on(0, 2), on(0, 3), on(0, 1, 3), on(0, 2, 3)],
    ),
    "an actor away from home goes home first, and gives up its last copies": (
        on(2, 0, 3),
        on(0),
        4,
        copies(1, 2, 3, 4),
        [on(0), on(2, 0, 3, 1), on(2, 0), on(2)],
    ),
    "copies of two GPUs come and go whole": (
        on(0, 1, layout=PAIR),
        on(0, 1, layout=PAIR),
        4,
        copies(1, 2, of=PAIR),
        [on(0, 1, 2, 3, layout=PAIR)],
    ),
    "a suspended actor may come back on any GPUs": (
        None,
        on(0),
        3,
        copies(1, 2, 3),
        [on(0), on(0, 1), on(0, 1, 2), on(1), on(2), on(0, 2), on(1, 2)],
    ),
    "only legal numbers of copies": (on(0), on(0), 3, copies(1, 3), [on(0, 1, 2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_places_come_in_order_of_their_likelihood(case: str) -> None:
    present, home, num_slots, layouts, want = CASES[case]
    assert list(foreseen(present, home, slots=SLOTS[:num_slots], layouts=layouts)) == want


PLACES = st.permutations(range(8)).flatmap(lambda order: st.integers(1, 4).map(lambda dp: on(*order[:dp])))


@given(present=st.none() | PLACES, home=PLACES, most=st.integers(1, 8))
def test_places_are_of_the_possible_layouts_and_only_layouts_on_slots(
    present: Place | None, home: Place, most: int
) -> None:
    layouts = copies(*range(1, most + 1), home.layout.dp)
    found = foreseen(present, home, slots=SLOTS, layouts=layouts)
    assert len(found) == len(set(found)) <= MOST_LAYOUTS
    assert present not in found
    for place in found:
        assert place.layout in layouts
        assert len(place.gpus) == len(set(place.gpus)) == place.layout.num_ranks
        assert set(place.gpus) <= set(SLOTS)


def test_places_on_slots_that_do_not_exist_are_left_out() -> None:
    assert foreseen(on(0, 1), on(0, 1, 2), slots=SLOTS[:2], layouts=copies(1, 2)) == (on(0),)


@pytest.mark.parametrize(
    ("cap_bytes", "want"),
    [
        (0, []),
        (9, []),
        (10, [(3, True)]),
        (33, [(3, True)]),
        (34, [(3, True), (2, False)]),
        (68, [(3, True), (2, True), (1, False)]),
        (136, [(3, True), (2, True), (1, True)]),
    ],
)
def test_places_keep_their_memory_in_their_order_within_the_cap(cap_bytes: int, want: list[tuple[int, bool]]) -> None:
    sizes = {3: 10, 2: 24, 1: 34}
    found = within([on(*range(dp)) for dp in sizes], cap_bytes=cap_bytes, rank_bytes=lambda layout: sizes[layout.dp])
    assert [(each.place.layout.dp, each.keeps_memory) for each in found] == want


@given(sizes=st.lists(st.integers(1, 100), max_size=8), cap_bytes=st.integers(0, 300))
def test_processes_have_never_more_than_the_cap_also_while_they_build(sizes: list[int], cap_bytes: int) -> None:
    places = [on(*range(dp)) for dp in range(1, len(sizes) + 1)]
    found = within(places, cap_bytes=cap_bytes, rank_bytes=lambda layout: sizes[layout.dp - 1])
    kept_bytes = 0
    for each in found:
        assert isinstance(each, Foreseen)
        size_bytes = sizes[each.place.layout.dp - 1]
        assert kept_bytes + size_bytes <= cap_bytes
        kept_bytes += size_bytes if each.keeps_memory else 0
