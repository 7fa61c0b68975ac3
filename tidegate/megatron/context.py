"""Cuts sequences over the ranks of a context-parallel group, and joins their results.

The cut is zig-zag, as in Megatron's attention and rotary embedding: of 2 * cp equal slices, rank r holds slices r and 2
* cp - 1 - r, in this order.

Invariants:
- Each position is on exactly one rank.
- With one rank nothing is changed.

Legend of shapes: B sequences, S positions, Q those of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def positions(length: int, *, cp: int, cp_rank: int, device: torch.device | None = None) -> torch.Tensor:
    """The global positions of a rank, in its order. Raises ValueError where 2 * cp does not divide the length."""
    if length % (2 * cp):
        raise ValueError(
            f"{length} positions do not divide by 2 * cp = 2 * {cp}: pad sequences to a multiple of {2 * cp}"
        )
    size = length // (2 * cp)
    starts = (cp_rank * size, (2 * cp - 1 - cp_rank) * size)
    return torch.cat([torch.arange(start, start + size, device=device) for start in starts])


def all_positions(length: int, *, cp: int, device: torch.device | None = None) -> torch.Tensor:
    """The positions of all ranks, one rank after another: their order after a gathering in rank order."""
    return torch.cat([positions(length, cp=cp, cp_rank=rank, device=device) for rank in range(cp)])


def own_part(whole_BS: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, Q]: this rank's positions."""
    if group.size() == 1:
        return whole_BS
    own_Q = positions(whole_BS.size(1), cp=group.size(), cp_rank=group.rank(), device=whole_BS.device)
    return whole_BS[:, own_Q]


def whole(part_BQ: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, S] on every rank; inverse of `own_part`.

    All ranks must compute the same loss from it: in the backward pass each rank takes its own part's gradient
    unchanged.
    """
    cp = group.size()
    if cp == 1:
        return part_BQ
    gathered_SB = gather_from_sequence_parallel_region(
        part_BQ.t().contiguous(), tensor_parallel_output_grad=False, group=group
    )
    order_S = all_positions(part_BQ.size(1) * cp, cp=cp, device=part_BQ.device)
    whole_BS: torch.Tensor = gathered_SB[torch.argsort(order_S)].t()
    return whole_BS
