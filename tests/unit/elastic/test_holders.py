"""The cells of one end of a reshard."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.elastic import cutter
from tidegate.elastic.plan.holders import Holders, State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import DistributedOptimizer, FlatRange
from tidegate.elastic.plan.parameters import Parameter, Split, Whole
from tidegate.elastic.plan.regions import Block
from tidegate.types import Layout

SPLIT = Parameter("split", (6, 4), 2, Split(1), 0)
WHOLE = Parameter("whole", (5, 3), 2, Whole(), 0)


def elements(blocks: tuple[Block, ...]) -> Counter[tuple[int, int]]:
    return Counter(
        (row, col)
        for block in blocks
        for row in range(block.row, block.row + block.rows)
        for col in range(block.col, block.col + block.cols)
    )


@pytest.mark.parametrize("parameter", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2), Layout(dp=3), Layout(tp=2)], ids=str)
def test_source_cells_are_disjoint_and_cover_the_tensor(parameter: Parameter, layout: Layout) -> None:
    mesh = Mesh(layout, tuple(range(layout.num_ranks)), even_chunks(1, pp=1))
    ranges = cutter.shares(mesh, [parameter], per_bucket=1)
    # Rank 0 also has a copy of two elements of its neighbour, so cells are cut where ranges overlap.
    own = ranges[0][parameter.name]
    size = parameter.shape[0] * parameter.shape[1] // (layout.tp if parameter is SPLIT else 1)
    ranges[0][parameter.name] = FlatRange(own.start, min(own.end + 2, size))
    holders = Holders(State(mesh, DistributedOptimizer(ranges)))

    cells = holders.source_state_cells(parameter, holders.group(parameter))

    found = sum((elements(cell.blocks) for cell in cells), Counter[tuple[int, int]]())
    num_elements = parameter.shape[0] * parameter.shape[1]
    assert (len(found), set(found.values())) == (num_elements, {1})
