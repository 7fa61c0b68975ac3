"""Units of GPUs are inside a node where they fit."""

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
    ids=["inside a node", "near", "on both", "the rest across nodes", "all GPUs if there are fewer", "none", "below 0"],
)
def test_units_are_inside_a_node_first(num_gpus: int, near: frozenset[NodeId], want: tuple[str, ...]) -> None:
    assert in_units(ODD, 2, num_gpus, near) == want


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_gpus", range(8))
def test_no_gpu_is_in_two_replicas(size: int, num_gpus: int) -> None:
    chosen = in_units(ODD, size, num_gpus)

    assert len(set(chosen)) == len(chosen) == min(num_gpus, len(ODD))
    assert set(chosen) <= set(ODD)


def test_gpus_that_remain_after_a_choice_keep_their_order() -> None:
    assert by_node(ODD) == [N0, N1]
    assert but_for(ODD, N0) == list(N1)
