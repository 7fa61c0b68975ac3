"""Packs the samples of a minibatch into micro-batches under a token cap, equally many for each share. Pure.

A share is the work of one replica, or one logical shard.

Order:
1. A sample over the cap is refused, or goes alone.
2. A share runs as many micro-batches as the cap needs, the longest samples first; and more, while the padding that they
   save is worth their cost.
3. The samples are cut into that many micro-batches so that the costliest costs least.
4. The micro-batches are assigned to the shares so that the shares' costs are even.

Invariants:
- Each sample is in one micro-batch.
- All shares run equally many micro-batches. Some are empty only where samples are too few.
- Rows times padded length is at most the cap, except for a longer sample, which is alone.
- The result is a function of lengths, cap and number of shares.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from tidegate.megatron.largest_differencing import even_parts
from tidegate.model_config import ModelConfig

PAD_MULTIPLE = 8
"""Padded lengths are multiples of this, so that few shapes occur.

Every context-parallel size of up to 4 divides them into its two parts per rank.
"""
PASS_POSITIONS = 256
"""The cost of a pass besides its rows, in positions without their attention.

A forward and backward pass of the demo's model takes 5 ms, and 0.018 ms per position in rows of 64, on one core. A
larger value makes fewer passes and more padding. On a GPU it was not measured.
"""
_PRECISION_BITS = 10
"""The precision of the bound on a micro-batch's cost. A thousandth is no loss, and each bit is a pass over all
lengths.
"""


class Oversize(StrEnum):
    """The treatment of a sample that is longer than the cap."""

    ALONE = "alone"
    REFUSE = "refuse"


class Packing(StrEnum):
    """The form in which the model gets a micro-batch."""

    PADDED = "padded"
    """As rows, right-padded."""
    THD = "thd"
    """As its sequences one after another. The cap still counts the padded rows."""


class SampleOverCap(ValueError):
    """The policy refuses a sample. Nothing has begun."""


@dataclass(frozen=True, slots=True)
class TokenCap:
    """The most positions of a micro-batch, padding included."""

    max_tokens: int
    token_cost: int = 0
    """A row of L positions costs token_cost * L + L^2; see `token_cost`."""
    pass_cost: int | None = None
    """The cost of a micro-batch besides its rows. None: there are no more micro-batches than the cap needs."""
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
        """A cap with the costs of the model's rows and passes."""
        cost = token_cost(model)
        return cls(max_tokens, cost, PASS_POSITIONS * cost, oversize, packing=packing)

    def row_length(self, length: int) -> int:
        """Positions of a row that ends with a sample of this length."""
        return max(-(-length // self.pad_multiple), 1) * self.pad_multiple

    def row_cost(self, row_length: int) -> int:
        return (self.token_cost + row_length) * row_length


def token_cost(model: ModelConfig) -> int:
    """The number of attended positions at which a token's attention costs as much as all its other multiplications.

        token_cost = W / (2 * num_layers * num_heads * head_dim)

    W is the number of weights that a token is multiplied with, over all layers and the output. An attended position
    costs twice the heads' width per layer.
    """
    attention = model.hidden_size * (model.qkv_size + model.num_heads * model.head_dim)
    mlp = 3 * model.hidden_size * model.ffn_hidden_size * (model.experts_per_token or 1)
    output = model.hidden_size * model.vocab_size
    return (model.num_layers * (attention + mlp) + output) // (2 * model.num_layers * model.num_heads * model.head_dim)


def pack(
    lengths: Sequence[int], cap: TokenCap, *, num_shares: int, multiple: int = 1, alike: bool = False
) -> list[list[tuple[int, ...]]]:
    """The micro-batches of each share, as indices into `lengths`, the longest samples first. () is an empty one.

    A share's number of micro-batches is a multiple of `multiple`. `alike`: the n-th micro-batches of all shares,
    widened to one shape, are together under the cap. Raises SampleOverCap where the policy is to refuse.
    """
    if not lengths:
        return [[] for _ in range(num_shares)]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rows = [cap.row_length(lengths[index]) for index in order]
    if cap.oversize is Oversize.REFUSE and rows[0] > cap.max_tokens:
        raise _over(rows, cap)
    # Micro-batches that are alike on all shares are cut for all shares together.
    width = num_shares if alike else 1
    num_batches, parts = _number_and_parts(rows, cap, num_shares=num_shares, multiple=multiple, width=width)
    if alike:
        dealt = [[_strip(part, share, num_shares) for part in parts] for share in range(num_shares)]
    else:
        costs = [len(part) * cap.row_cost(rows[part.start]) for part in parts]
        shares = even_parts(costs, num_shares, equal_numbers=True)
        # Order shares by their samples and not by cost, because one replica may run several shares.
        dealt = [[parts[number] for number in numbers] for numbers in sorted(map(sorted, shares))]
    batches = [[tuple(order[place] for place in part) for part in share] for share in dealt]
    return [share + [()] * (num_batches - len(share)) for share in batches]


def _over(rows: Sequence[int], cap: TokenCap) -> SampleOverCap:
    num_over = sum(row > cap.max_tokens for row in rows)
    return SampleOverCap(
        f"{num_over} of {len(rows)} samples are longer than a micro-batch may be: the longest takes {rows[0]} "
        f"positions and the cap is {cap.max_tokens}; raise the cap to {rows[0]}, or let such a sample go alone"
    )


def _number_and_parts(
    rows: Sequence[int], cap: TokenCap, *, num_shares: int, multiple: int, width: int
) -> tuple[int, list[range]]:
    """The number of micro-batches of a share, and the parts into which the sorted rows are cut for them."""
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
    """The least bound on the cost of a part, up to the precision, with at most `num_most` parts. `high`
    satisfies it.
    """
    low = 0
    while high - low > high >> _PRECISION_BITS:
        bound = (low + high) // 2
        if _count(groups, cap, bound=bound, width=width) <= num_most:
            high = bound
        else:
            low = bound + 1
    return high


def _count(groups: Sequence[tuple[int, int]], cap: TokenCap, *, bound: int, width: int) -> int:
    """The number of parts that `_cut` makes of rows, which are passed as (length, number of them)."""
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
    """Runs of the sorted rows, each as long as the cap and the bound on its cost allow, `width` times over.

    No other cut in this order under both limits has fewer parts, because every part of a fitting run fits too.
    """
    parts: list[range] = []
    start = 0
    while start < len(rows):
        end = start + width * _num_rows(rows[start], cap.row_cost(rows[start]), cap, bound)
        parts.append(range(start, min(end, len(rows))))
        start = end
    return parts


def _split(parts: Sequence[range], rows: Sequence[int], cap: TokenCap, *, num_most: int, width: int) -> list[range]:
    """Halve the costliest part again and again, until there are `num_most` parts or each has at most a row per share.

    Equal rows are cut together, which leaves fewer parts than allowed. A half costs no more than its rows did before.
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
    """The rows of one micro-batch, at least one."""
    return max(1, min(cap.max_tokens // length, bound // cost))


def _strip(part: range, share: int, num_shares: int) -> range:
    """A share's rows of a part that is cut for all shares."""
    num_rows = -(-len(part) // num_shares)
    return part[share * num_rows : (share + 1) * num_rows]
