"""A mesh puts each rank where Megatron puts it and gives each layer one home. Impossible layouts are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from megatron.core.parallel_state import RankGenerator

from tidegate.elastic.plan.layout import Home, LayoutRefused, Mesh, even_chunks
from tidegate.types import Layout

ORDER = "tp-cp-ep-dp-pp"
LAYOUTS = (
    Layout(tp=2, pp=2, dp=3),
    Layout(tp=2, pp=2, dp=2, cp=2),
    Layout(tp=2, pp=2, dp=4, ep=2),
    Layout(tp=2, dp=2, cp=2, ep=4),
)


def mesh(layout: Layout, first: int = 0) -> Mesh:
    return Mesh(layout, tuple(range(first, first + layout.num_ranks)), even_chunks(4, pp=layout.pp))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dense_shards_are_held_by_megatrons_groups(layout: Layout) -> None:
    groups = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER)
    want = sorted(map(tuple, groups.get_ranks("dp-cp")))
    of = mesh(layout)
    got = [of.holders(stage, tp=tp, ep=None) for stage in range(layout.pp) for tp in range(layout.tp)]
    assert sorted(got) == want


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_expert_shards_are_held_by_megatrons_groups(layout: Layout) -> None:
    expert_dp = layout.dp * layout.cp // layout.ep
    groups = RankGenerator(tp=layout.tp, ep=layout.ep, dp=expert_dp, pp=layout.pp, cp=1, order=ORDER)
    want = sorted(map(tuple, groups.get_ranks("dp")))
    of = mesh(layout)
    places = [(stage, tp, ep) for stage in range(layout.pp) for tp in range(layout.tp) for ep in range(layout.ep)]
    assert sorted(of.holders(stage, tp=tp, ep=ep) for stage, tp, ep in places) == want


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_ranks_coordinates_are_its_places_in_megatrons_groups(layout: Layout) -> None:
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER)
    expert_dp = layout.dp * layout.cp // layout.ep
    experts = RankGenerator(tp=layout.tp, ep=layout.ep, dp=expert_dp, pp=layout.pp, cp=1, order=ORDER)
    of = mesh(layout)
    for rank in of.ranks:
        at = of.coordinates(rank)
        for axis, generator, got in (
            ("tp", dense, at.tp),
            ("cp", dense, at.cp),
            ("dp", dense, at.dp),
            ("pp", dense, at.stage),
            ("ep", experts, at.ep),
        ):
            group = next(group for group in generator.get_ranks(axis) if rank in group)
            assert group.index(rank) == got, (rank, axis)


def test_a_mesh_may_have_any_ranks_in_any_order() -> None:
    of = Mesh(Layout(tp=2, dp=2), (9, 4, 0, 7), even_chunks(1, pp=1))
    assert [of.holders(0, tp=tp, ep=None) for tp in range(2)] == [(9, 0), (4, 7)]
    assert of.holders(0, tp=None, ep=None) == (9, 4, 0, 7)


def test_layers_are_dealt_out_chunk_by_chunk_and_stage_by_stage() -> None:
    of = Mesh(Layout(pp=2, vpp=2), (0, 1), ((1, 2), (0, 1)))
    want = [Home(0, 0, 0), Home(1, 0, 0), Home(1, 0, 1), Home(1, 1, 0)]
    assert list(of.homes()) == want
    assert of.num_layers == 4


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "too few ranks": (lambda: Mesh(Layout(tp=2, dp=2), (0, 1, 2), ((1,),)), r"2 \* 1 \* 2 \* 1 = 4 ranks, and got 3"),
    "a rank twice": (lambda: Mesh(Layout(dp=2), (3, 3), ((1,),)), "names a rank twice"),
    "an uneven ep": (lambda: Mesh(Layout(dp=6, ep=4), tuple(range(6)), ((1,),)), "legal ep: 1, 2, 3, 6"),
    "a stage without a number": (lambda: Mesh(Layout(pp=2), (0, 1), ((2,),)), "numbers of layers of 2 stages"),
    "no chunk": (lambda: Mesh(Layout(), (0,), ()), "vpp=1 needs as many virtual chunks, got 0"),
    "fewer than no layers": (lambda: Mesh(Layout(pp=2), (0, 1), ((3, -1),)), "fewer than 0 layers"),
    "more chunks than vpp": (lambda: Mesh(Layout(), (0,), ((1,), (1,))), "vpp=1 needs as many virtual chunks, got 2"),
    "uneven layers": (lambda: even_chunks(12, pp=4, vpp=2), "legal pp with vpp=2: 1, 2, 3, 6"),
    "no stage": (lambda: even_chunks(12, pp=0), r"pp \* vpp = 0 \* 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_layout_is_refused_with_the_legal_values(name: str) -> None:
    make, want = REFUSED[name]
    with pytest.raises(LayoutRefused, match=want):
        make()
