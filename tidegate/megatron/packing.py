"""Packs the samples of a minibatch into micro-batches under a cap of tokens, equally many for each share. Pure.

A share is what one replica runs, or one logical shard. Order: a sample over the cap is refused or let alone; a share
runs as many micro-batches as the cap needs, the longest samples first, and more while what they save in padding is
worth them; as many are cut so that the costliest costs least, and dealt to the shares so that their costs are even.
Invariants: each sample is in one micro-batch; all shares run equally many, some of them empty only where samples are
too few; rows times padded length is at most the cap, but for a sample that is longer and alone; what is packed follows
from lengths, cap and number of shares.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from tidegate.megatron.differencing import differenced
from tidegate.model_config import ModelConfig

PAD_MULTIPLE = 8
"""Padded lengths are multiples of this, so that few shapes occur, and every context-parallel size of up to 4 divides
them into its two parts a rank."""
PASS_POSITIONS = 256
"""What a pass costs besides its rows, in positions without their attention. A forward and backward pass of the demo's
model takes 5 ms and 0.018 ms a position of rows of 64, on one core. Where it is larger there are fewer passes and more
padding; on a GPU it was not measured."""
_PRECISION_BITS = 10
"""Of the bound on a micro-batch's cost: a thousandth is no loss, and each bit is a pass over all lengths."""


class Oversize(StrEnum):
    """What becomes of a sample that is longer than the cap."""

    ALONE = "alone"
    REFUSE = "refuse"


class Packing(StrEnum):
    """How the model is given a micro-batch."""

    PADDED = "padded"
    """As rows, right-padded."""
    THD = "thd"
    """As its sequences one after the other. The cap is kept by the rows that they would have been."""


class SampleOverCap(ValueError):
    """Of a sample that the policy refuses; nothing has begun."""


@dataclass(frozen=True, slots=True)
class TokenCap:
    """How many positions a micro-batch may have, padding included."""

    max_tokens: int
    token_cost: int = 0
    """A row of L positions costs token_cost * L + L^2; see `token_cost`."""
    pass_cost: int | None = None
    """Of a micro-batch besides its rows; None: there are no more of them than the cap needs."""
    oversize: Oversize = Oversize.ALONE
    pad_multiple: int = PAD_MULTIPLE
    packing: Packing = Packing.PADDED

    def __post_init__(self) -> None:
        if self.pad_multiple < 1 or self.token_cost < 0:
            raise ValueError(
                f"token cap pad_multiple={self.pad_multiple} must be at least 1 and token_cost={self.token_cost} at "
                "least 0"
            )
        if self.max_tokens < self.pad_multiple:
            raise ValueError(
                f"token cap max_tokens={self.max_tokens} holds no row: it must be at least pad_multiple="
                f"{self.pad_multiple}"
            )

    @classmethod
    def of_model(
        cls,
        model: ModelConfig,
        max_tokens: int,
        oversize: Oversize = Oversize.ALONE,
        packing: Packing = Packing.PADDED,
    ) -> TokenCap:
        """With what the model's rows and passes cost."""
        cost = token_cost(model)
        return cls(max_tokens, cost, PASS_POSITIONS * cost, oversize, packing=packing)

    def row_length(self, length: int) -> int:
        """Positions of a row that ends with a sample of this length."""
        return max(-(-length // self.pad_multiple), 1) * self.pad_multiple

    def row_cost(self, row_length: int) -> int:
        return (self.token_cost + row_length) * row_length


def token_cost(model: ModelConfig) -> int:
    """To how many positions a token has to attend for its attention to cost as much as all else of it does.

    Counted in multiplications: each weight once, and twice the heads' width for a position that is attended to.
    """
    attention = model.hidden_size * (model.qkv_size + model.num_heads * model.head_dim)
    mlp = 3 * model.hidden_size * model.ffn_hidden_size * (model.experts_per_token or 1)
    output = model.hidden_size * model.vocab_size
    return (model.num_layers * (attention + mlp) + output) // (2 * model.num_layers * model.num_heads * model.head_dim)


def pack(
    lengths: Sequence[int], cap: TokenCap, *, num_shares: int, multiple: int = 1, alike: bool = False
) -> list[list[tuple[int, ...]]]:
    """Of each share its micro-batches, as indices into `lengths`, the longest samples first; () is an empty one.

    A share's number of micro-batches is a multiple of `multiple`. `alike`: the n-th of all shares, widened to one
    shape, are together under the cap. SampleOverCap where the policy is to refuse.
    """
    if not lengths:
        return [[] for _ in range(num_shares)]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rows = [cap.row_length(lengths[index]) for index in order]
    if cap.oversize is Oversize.REFUSE and rows[0] > cap.max_tokens:
        raise _over(rows, cap)
    # One that is alike on all shares is cut for all of them together.
    width = num_shares if alike else 1
    num_batches, parts = _number_and_parts(rows, cap, num_shares=num_shares, multiple=multiple, width=width)
    if alike:
        dealt = [[_strip(part, share, num_shares) for part in parts] for share in range(num_shares)]
    else:
        costs = [len(part) * cap.row_cost(rows[part.start]) for part in parts]
        shares = differenced(costs, num_shares, equal_numbers=True)
        # In an order that is none of cost: several of them may be one replica's.
        dealt = [[parts[number] for number in numbers] for numbers in sorted(map(sorted, shares))]
    batches = [[tuple(order[place] for place in part) for part in share] for share in dealt]
    return [share + [()] * (num_batches - len(share)) for share in batches]


def _over(rows: Sequence[int], cap: TokenCap) -> SampleOverCap:
    num_over = sum(row > cap.max_tokens for row in rows)
    return SampleOverCap(
        f"{num_over} of {len(rows)} samples are longer than a micro-batch may be: the longest takes {rows[0]} "
        f"positions and the cap is {cap.max_tokens}; raise the cap to {rows[0]}, or let such a sample be alone"
    )


def _number_and_parts(
    rows: Sequence[int], cap: TokenCap, *, num_shares: int, multiple: int, width: int
) -> tuple[int, list[range]]:
    """How many micro-batches a share runs, and the parts that the sorted rows are cut into for them."""
    groups = [(length, len(list(same))) for length, same in groupby(rows)]
    num_dealt = num_shares // width

    def evened(num_batches: int, high: int) -> tuple[int, list[range], int]:
        """The least bound on the cost of a part, the parts under it, and what everything costs."""
        num_most = num_batches * num_dealt
        bound = _least_bound(groups, cap, width=width, num_most=num_most, high=high)
        parts = _split(_cut(rows, cap, bound=bound, width=width), rows, cap, num_most=num_most, width=width)
        total = sum(_cost(part, rows, cap) for part in parts)
        return bound, parts, total + num_batches * num_shares * (cap.pass_cost or 0)

    no_bound = max(cap.max_tokens, rows[0]) * (cap.token_cost + rows[0])
    num_needed = _count(groups, cap, bound=no_bound, width=width)
    num_batches = -(-num_needed // (num_dealt * multiple)) * multiple
    bound, parts, total = evened(num_batches, no_bound)
    while cap.pass_cost is not None and num_batches * num_dealt < len(rows):
        bound, tried, tried_total = evened(num_batches + multiple, bound)
        if tried_total >= total:
            break
        num_batches, parts, total = num_batches + multiple, tried, tried_total
    return num_batches, parts


def _cost(part: range, rows: Sequence[int], cap: TokenCap) -> int:
    return len(part) * cap.row_cost(rows[part.start])


def _least_bound(groups: Sequence[tuple[int, int]], cap: TokenCap, *, width: int, num_most: int, high: int) -> int:
    """On the cost of a part, up to its precision, with which there are at most `num_most`; with `high` there are."""
    low = 0
    while high - low > high >> _PRECISION_BITS:
        bound = (low + high) // 2
        if _count(groups, cap, bound=bound, width=width) <= num_most:
            high = bound
        else:
            low = bound + 1
    return high


def _count(groups: Sequence[tuple[int, int]], cap: TokenCap, *, bound: int, width: int) -> int:
    """How many parts `_cut` makes of rows, given as (length, number of them)."""
    num_parts = room = 0
    for length, count in groups:
        if count > room:
            num_rows = width * _num_rows(length, cap.row_cost(length), cap, bound)
            more = -((room - count) // num_rows)
            num_parts += more
            room += more * num_rows
        room -= count
    return num_parts


def _cut(rows: Sequence[int], cap: TokenCap, *, bound: int, width: int) -> list[range]:
    """Runs of the sorted rows, each as long as the cap and the bound on its cost let it be, `width` times over.

    Nothing that is cut in this order under both has fewer: a part of what fits does fit.
    """
    parts: list[range] = []
    start = 0
    while start < len(rows):
        end = start + width * _num_rows(rows[start], cap.row_cost(rows[start]), cap, bound)
        parts.append(range(start, min(end, len(rows))))
        start = end
    return parts


def _split(parts: Sequence[range], rows: Sequence[int], cap: TokenCap, *, num_most: int, width: int) -> list[range]:
    """Halves of the costliest again and again, until there are `num_most` or none has more than a row for each.

    Rows that are equal are cut away together, and leave fewer parts than there may be. A half costs no more than its
    rows did before.
    """
    heap = [(-_cost(part, rows, cap), part.start, part.stop) for part in parts if len(part) > width]
    done = [part for part in parts if len(part) <= width]
    heapq.heapify(heap)
    while heap and len(heap) + len(done) < num_most:
        _, start, stop = heapq.heappop(heap)
        middle = start + -(-(stop - start) // (2 * width)) * width
        for half in (range(start, middle), range(middle, stop)):
            if len(half) > width:
                heapq.heappush(heap, (-_cost(half, rows, cap), half.start, half.stop))
            else:
                done.append(half)
    return sorted([*done, *(range(start, stop) for _, start, stop in heap)], key=lambda part: part.start)


def _num_rows(length: int, cost: int, cap: TokenCap, bound: int) -> int:
    """Of one micro-batch: one at least."""
    return max(1, min(cap.max_tokens // length, bound // cost))


def _strip(part: range, share: int, num_shares: int) -> range:
    """A share's rows of what is cut for all."""
    num_rows = -(-len(part) // num_shares)
    return part[share * num_rows : (share + 1) * num_rows]
