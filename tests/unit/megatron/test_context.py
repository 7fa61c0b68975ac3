"""Context parallelism distributes positions so that every rank has the same causal work, and each position is
on one rank.
"""

from __future__ import annotations

import pytest
import torch

from tidegate.megatron.context import all_positions, positions


def test_a_rank_holds_one_early_and_one_late_slice() -> None:
    assert positions(8, cp=2, cp_rank=0).tolist() == [0, 1, 6, 7]
    assert positions(8, cp=2, cp_rank=1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_ranks_together_hold_each_position_once_and_each_sees_as_many_keys(cp: int) -> None:
    length = 4 * cp
    assert sorted(all_positions(length, cp=cp).tolist()) == list(range(length))
    seen = {int(torch.sum(positions(length, cp=cp, cp_rank=rank) + 1)) for rank in range(cp)}
    assert len(seen) == 1


def test_a_length_that_does_not_divide_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"10 positions do not divide by 2 \* cp = 2 \* 2: pad sequences .* of 4"):
        positions(10, cp=2, cp_rank=0)
