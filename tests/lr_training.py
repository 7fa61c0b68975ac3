"""Training as the learning rate sees it: a token cap cuts batches of samples, ranks get them, updates group them.

The cutting is as plain as possible. A ledger gets the consumption of an update, or the test only counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tidegate.lr.progress import LrLedger


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch becomes updates. `grouping`: the micro-batches of a rank in an update."""

    cap: int
    dp: int
    grouping: int


def updates_of(units: Sequence[int], lengths: Sequence[int], plan: Plan) -> Iterator[list[list[int]]]:
    """Each update as the units of each rank. A unit's length is its sample's, whatever the epoch."""
    ranks = [micro_batches(units[rank :: plan.dp], lengths, plan.cap) for rank in range(plan.dp)]
    for first in range(0, max(map(len, ranks)), plan.grouping):
        yield [[unit for batch in own[first : first + plan.grouping] for unit in batch] for own in ranks]


def micro_batches(units: Sequence[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Micro-batches in order, up to the cap. A sample over the cap goes alone."""
    batches: list[list[int]] = []
    room = 0
    for unit in units:
        length = lengths[unit % len(lengths)]
        if not batches or length > room:
            batches.append([])
            room = cap
        batches[-1].append(unit)
        room -= length
    return batches


def train(
    ledger: LrLedger,
    batch: int,
    lengths: Sequence[int],
    plan: Plan,
    *,
    epochs: int = 1,
    nominal: Fraction | None = None,
) -> tuple[LrLedger, dict[Fraction, float]]:
    """Trains a whole batch. Gives the rate of each update by the share of the batch that was consumed before it."""
    num_units = len(lengths) * epochs
    ledger = ledger.opened(batch, num_units, nominal=nominal, dp=plan.dp)
    rates: dict[Fraction, float] = {}
    consumed = 0
    for number, ranks in enumerate(updates_of(range(num_units), lengths, plan)):
        rates[Fraction(consumed, num_units)] = ledger.rate
        units = [unit for rank in ranks for unit in rank]
        ledger = ledger.committed_update(batch, str(number), units)
        consumed += len(units)
    return ledger.closed(batch), rates
