"""The holders of a region serve in turns."""

from __future__ import annotations

from collections import Counter

import pytest

from tidegate.elastic.plan.exchange import Cell, Exchange
from tidegate.elastic.plan.regions import Block

BLOCK = (Block(0, 0, 1, 4, 0, 4),)


@pytest.mark.parametrize("num_holders", [2, 3, 4])
@pytest.mark.parametrize("num_receivers", [1, 2, 5])
@pytest.mark.parametrize("first", [0, 7])
def test_holders_serve_numbers_that_differ_by_at_most_one(num_holders: int, num_receivers: int, first: int) -> None:
    receivers = tuple(range(10, 10 + num_receivers))
    exchange = Exchange((Cell(tuple(range(num_holders)), BLOCK),), (Cell(receivers, BLOCK),), {})
    served = Counter(dict.fromkeys(range(num_holders), 0))
    for turn in range(first, first + 6):
        transfers = [transfer for rank in receivers for transfer in exchange.arriving(rank, turn)]
        served.update(transfer.source for transfer in transfers)
        sends = [transfer for rank in range(num_holders) for transfer in exchange.leaving(rank, turn)]
        assert sorted(sends) == sorted(transfers)
        assert max(served.values()) - min(served.values()) <= 1
