"""Strips of memory: which of them join, and which copies are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tidegate.elastic.carry.shared_memory import SharedMemory, Strip, merged
from tidegate.elastic.carry.transport import TransferFailed
from tidegate.elastic.model.memory import ArenaReader
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import RegionCopy

KEY: TensorKey = ("p", StateKind.WEIGHT)
COPY = RegionCopy(*KEY, 4, 0, 0, 0, 0, 2, 4, 0, 4, 0, 4)


def test_strips_that_continue_each_other_at_both_ends_are_joined() -> None:
    first, second = Strip(100, 500, 1, 16, 16, 16), Strip(116, 516, 2, 8, 8, 8)
    apart = Strip(300, 532, 1, 4, 4, 4)

    assert list(merged([apart, second, first])) == [Strip(100, 500, 1, 32, 16, 16), apart]


@pytest.mark.parametrize(
    "change",
    [{"source_offset": 1}, {"target_offset": 9}, {"rows": 3}, {"itemsize": 2}, {"name": "q"}],
    ids=["at the source", "at the target", "a row too many", "another itemsize", "no such tensor"],
)
def test_a_region_outside_its_tensor_is_refused_before_anything_is_written(change: dict[str, Any]) -> None:
    source, target = torch.ones(8), torch.zeros(8)
    transport = SharedMemory({}, ArenaReader())

    with pytest.raises(TransferFailed, match="the plan does not belong to these skeletons"):
        transport.pull([COPY, COPY._replace(**change)], [], {KEY: source}, {KEY: target})

    assert not target.any()
    transport.pull([COPY], [], {KEY: source}, {KEY: target})
    assert target.eq(1).all()
