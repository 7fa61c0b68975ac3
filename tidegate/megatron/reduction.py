"""Sums whose bits do not depend on the number of ranks, or on the cuts between ranks.

- Gradients go through a fixed binary tree over logical shards. The local part adds one shard after another
  (`RunningTree`). The part over ranks is an exchange, after which each rank adds up its own elements (`own_sum`).
- The norm's squares become integers, whose sum has one value in any order (`sum_of_squares`), after Demmel and Nguyen,
  "Parallel Reproducible Summation" (2015).

Invariants:
- A tree's shape depends on the number of terms alone.
- A complete tree over a power of two of shards is the tree over ranks of the trees over each rank's shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

WORD_BITS = 30
"""The bits of a square in each of two words. The first word begins at the largest square's top bit.

Two words keep 60 bits, more than fp64's 53, so the norm is nearer to the exact one than an fp64 sum. 2^(63 - 30)
squares fit in an int64 sum.
"""

_PIECE = 1 << 16
"""Elements squared at once: their fp64 copies stay in a core's cache. 2^(16 + 30) < 2^53, so fp64 sums are exact."""


class RunningTree:
    """The sum of terms that arrive one after another, by the binary tree over a power of two of them.

    It holds as many tensors as the number of terms so far has ones in binary.
    """

    def __init__(self) -> None:
        self._partial: list[torch.Tensor] = []
        self._num_terms = 0

    def add(self, term: torch.Tensor) -> None:
        """The tree takes over the tensor."""
        complete = self._num_terms
        while complete & 1:
            term = self._partial.pop().add_(term)
            complete >>= 1
        self._partial.append(term)
        self._num_terms += 1

    def finish(self, last: torch.Tensor) -> None:
        """Turn `last`, the last term of the power of two, into the sum of all. The tree is empty again."""
        while self._partial:
            last.add_(self._partial.pop())
        self._num_terms = 0


def tree_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of neighbours, then of neighbours' sums, and so on. An odd term waits for the next level."""
    while len(terms) > 1:
        pairs = [left + right for left, right in zip(terms[::2], terms[1::2], strict=False)]
        terms = [*pairs, terms[-1]] if len(terms) % 2 else pairs
    return terms[0]


def own_sum(
    flat: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, *, num_context_ranks: int = 1
) -> torch.Tensor:
    """The elementwise sum over the group of this rank's range of `flat`. `sizes` are all ranks' ranges in order.

    Each `num_context_ranks` neighbours of the group are one replica. The tree is over replicas first.
    """
    rank, num_ranks = group.rank(), group.size()
    if num_ranks == 1:
        return flat
    received = flat.new_empty((num_ranks, sizes[rank]))
    dist.all_to_all_single(received.view(-1), flat, [sizes[rank]] * num_ranks, list(sizes), group=group)
    return tree_sum([tree_sum(list(received[first::num_context_ranks])) for first in range(num_context_ranks)])


def sum_of_squares(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, *, device: torch.device) -> float:
    """The sum of the squares of fp32 elements over all ranks of the group; inf where an element is not finite."""
    flat = (tensor.detach().reshape(-1) for tensor in tensors if tensor.numel())
    pieces = [piece for tensor in flat for piece in torch.split(tensor, _PIECE)]
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    for piece in pieces:
        largest = torch.maximum(largest, piece.abs().amax())
    # Replace NaN, because a maximum over ranks may drop it.
    largest.nan_to_num_(nan=math.inf, posinf=math.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    top = float(largest) ** 2
    if top == 0.0 or not math.isfinite(top):
        return top
    exponent = math.frexp(top)[1]
    words = torch.zeros(2, dtype=torch.int64, device=device)
    for piece in pieces:
        words += _words(piece, exponent)
    dist.all_reduce(words, group=group)
    high, low = words.tolist()
    return math.ldexp((high << WORD_BITS) + low, exponent - 2 * WORD_BITS)


def _words(piece: torch.Tensor, exponent: int) -> torch.Tensor:
    """The sums of the squares' first and second WORD_BITS bits below 2^exponent. Each step is exact in fp64."""
    scaled = piece.double().square_().mul_(2.0 ** (WORD_BITS - exponent))
    high = scaled.floor()
    low = scaled.sub_(high).mul_(2.0**WORD_BITS).floor_()
    return torch.stack([high.sum(), low.sum()]).long()
