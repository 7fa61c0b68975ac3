"""The rule that packing is measured against: Karmarkar and Karp's differencing on sums of lengths, applied twice.

As verl deals a batch out and cuts it (`verl/utils/seqlen_balancing.py`; slime and SkyRL do likewise): samples go to
ranks in equal numbers with even sums of tokens; a rank's K is the largest number of caps that any rank's tokens fill;
each rank's samples go into K micro-batches with even sums. The rule knows no padding, so that right-padded its
micro-batches may be over the cap; with `keeps_cap`, K grows until none is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.megatron.largest_differencing import even_parts
from tidegate.megatron.packing import TokenCap

Ranks = list[list[list[int]]]
"""Of each rank its micro-batches, as indices of samples."""


def by_karmarkar_karp(lengths: Sequence[int], cap: TokenCap, *, num_ranks: int, keeps_cap: bool) -> Ranks:
    of_ranks = even_parts(lengths, num_ranks, equal_numbers=True)
    num_batches = max(-(-sum(lengths[index] for index in of_rank) // cap.max_tokens) for of_rank in of_ranks)
    while True:
        packed = []
        for of_rank in of_ranks:
            parts = even_parts([lengths[index] for index in of_rank], num_batches)
            packed.append([[of_rank[place] for place in part] for part in parts])
        is_kept = all(
            len(batch) <= 1 or positions(batch, lengths, cap) <= cap.max_tokens for own in packed for batch in own
        )
        if is_kept or not keeps_cap:
            return packed
        num_batches += 1


def positions(batch: Sequence[int], lengths: Sequence[int], cap: TokenCap) -> int:
    """Of a right-padded micro-batch; an empty one is run as a row of the least length."""
    return max(len(batch), 1) * max((cap.row_length(lengths[index]) for index in batch), default=cap.pad_multiple)


def waste(ranks: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], cap: TokenCap) -> float:
    """The share of all positions that are run and hold no token."""
    return 1 - sum(lengths) / sum(positions(batch, lengths, cap) for own in ranks for batch in own)
