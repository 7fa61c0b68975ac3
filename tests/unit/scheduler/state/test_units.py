"""Units of GPUs are inside a node as far as they fit."""

from __future__ import annotations

import pytest

from services.scheduler.state.units import but_for, by_node, in_units
from tests.unit.scheduler.fake_parts import gpu
from tidegate.types import NodeId

ODD = tuple(gpu(node, index) for index in range(3) for node in ("n1", "n0"))
"""Three GPUs on each of two nodes, in turns."""
N0, N1 = (tuple(gpu(node, index) for index in range(3)) for node in ("n0", "n1"))


@pytest.mark.parametrize(
    ("num_gpus", "near", "want"),
    [
        (2, frozenset(), N0[:2]),
        (2, frozenset({NodeId("n1")}), N1[:2]),
        (4, frozenset(), (*N0[:2], *N1[:2])),
        (6, frozenset(), (*N0[:2], *N1[:2], N1[2], N0[2])),
        (9, frozenset(), (*N0[:2], *N1[:2], N1[2], N0[2])),
        (0, frozenset(), ()),
        (-1, frozenset(), ()),
    ],
    ids=["inside a node", "near", "on both", "the rest across nodes", "all there are", "none", "less than none"],
)
def test_units_are_inside_a_node_first(num_gpus: int, near: frozenset[NodeId], want: tuple[str, ...]) -> None:
    assert in_units(ODD, 2, num_gpus, near) == want


def test_units_left_after_a_choice_keep_their_order() -> None:
    assert by_node(ODD) == [N0, N1]
    assert but_for(ODD, N0) == list(N1)
