"""The rule that packing is compared with: Karmarkar and Karp's differencing on sums of lengths, applied twice.

verl distributes and cuts a batch in this way (`verl/utils/seqlen_balancing.py`); slime and SkyRL do the same:
1. Samples go to ranks in equal numbers with even sums of tokens.
2. K is the largest number of caps that any rank's tokens fill.
3. Each rank's samples go into K micro-batches with even sums.
The rule ignores padding, so right-padded micro-batches may exceed the cap. With `keeps_cap`, K grows until none does.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.megatron.largest_differencing import even_parts
from tidegate.megatron.packing import TokenCap

Ranks = list[list[list[int]]]
"""The micro-batches of each rank, as indices of samples."""


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
    """The positions of a right-padded micro-batch. An empty one runs as a row of the smallest length."""
    return max(len(batch), 1) * max((cap.row_length(lengths[index]) for index in batch), default=cap.pad_multiple)


def waste(ranks: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], cap: TokenCap) -> float:
    """The share of computed positions without a token."""
    return 1 - sum(lengths) / sum(positions(batch, lengths, cap) for own in ranks for batch in own)
