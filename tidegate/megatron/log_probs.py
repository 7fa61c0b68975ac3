"""Log-probabilities of tokens from Megatron's logits, over a vocabulary that is split between tensor-parallel ranks.

The convention: the log-probability at position t is that of token t, given the tokens before it (logits shifted by
one), under the full distribution of logits / temperature. Position 0 has none and holds 0.

Invariants:
- Padding rows of the vocabulary have no probability.
- The same layout, padding and weights give the same bits, with gradients or without.

Legend of shapes: B sequences, S positions, Q those of this cp rank, T predicted positions, V this rank's part of the
padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.context import own_part, whole
from tidegate.megatron.schedule import run_micro_batches


def token_log_probs(
    logits_BQV: torch.Tensor,
    tokens_BS: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    groups: ProcessGroupCollection,
) -> torch.Tensor:
    """[B, S] in fp32, the same on every tp and cp rank, differentiable with respect to this rank's logits.

    All cp ranks must compute the same loss from it: each takes the gradients of its own positions.
    """
    if groups.cp.size() == 1:
        logits_BTV, targets_BT = logits_BQV[:, :-1], tokens_BS[:, 1:]
        return torch.nn.functional.pad(_log_probs(logits_BTV, targets_BT, vocab_size, temperature, groups.tp), (1, 0))
    # The last position has no next token. Its rank computes a meaningless number, which the joining drops.
    targets_BQ = own_part(tokens_BS.roll(-1, dims=1), groups.cp)
    log_probs_BQ = _log_probs(logits_BQV, targets_BQ, vocab_size, temperature, groups.tp)
    return torch.nn.functional.pad(whole(log_probs_BQ, groups.cp)[:, :-1], (1, 0))


def forward_log_probs(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[TokenBatch],
    *,
    vocab_size: int,
    temperature: float,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> list[npt.NDArray[np.float32]]:
    """[B, S] of each micro-batch, on every tp rank of the last pipeline stage; [] on other stages.

    Every rank of the pipeline calls it with the same micro-batches.
    """

    def keep(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
        log_probs_BS = token_log_probs(
            logits_BQV, tokens_BS, vocab_size=vocab_size, temperature=temperature, groups=groups
        )
        return log_probs_BS, log_probs_BS.cpu().numpy()

    return run_micro_batches(chunks, batches, keep, groups=groups, device=device, forward_only=True)


def _log_probs(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, vocab_size: int, temperature: float, group: dist.ProcessGroup
) -> torch.Tensor:
    log_probs_BT: torch.Tensor = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's is untyped
        logits_BTV, targets_BT, vocab_size, temperature, group
    )
    return log_probs_BT


class _VocabParallelLogProbs(torch.autograd.Function):
    """log softmax(logits / temperature) at the targets. Where tp > 1 it takes two small collectives of [B, T]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BTV: torch.Tensor,
        targets_BT: torch.Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        split = group.size() > 1
        num_rows = logits_BTV.size(-1)
        first_row = group.rank() * num_rows
        scaled_BTV = logits_BTV.float() / temperature
        scaled_BTV[..., max(vocab_size - first_row, 0) :] = -torch.inf
        maximum_BT = scaled_BTV.amax(dim=-1)
        if split:
            dist.all_reduce(maximum_BT, op=dist.ReduceOp.MAX, group=group)
        scaled_BTV -= maximum_BT.unsqueeze(-1)
        rows_BT1 = (targets_BT - first_row).unsqueeze(-1)
        held_BT1 = (rows_BT1 >= 0) & (rows_BT1 < num_rows)
        rows_BT1 = rows_BT1.clamp(0, num_rows - 1)
        target_BT = torch.where(held_BT1, scaled_BTV.gather(-1, rows_BT1), 0.0).squeeze(-1)
        exponents_BTV = scaled_BTV.exp_()
        sums = torch.stack([exponents_BTV.sum(dim=-1), target_BT])
        if split:
            dist.all_reduce(sums, group=group)
        sum_BT, target_BT = sums.unbind()
        probabilities_BTV = exponents_BTV.div_(sum_BT.unsqueeze(-1))
        ctx.save_for_backward(probabilities_BTV, rows_BT1, held_BT1)
        ctx.temperature = temperature
        log_probs_BT: torch.Tensor = target_BT - sum_BT.log()
        return log_probs_BT

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities_BTV, rows_BT1, held_BT1 = ctx.saved_tensors
        gradient_BT1 = (gradients[0] / ctx.temperature).unsqueeze(-1)
        gradient_BTV = -gradient_BT1 * probabilities_BTV
        gradient_BTV.scatter_add_(-1, rows_BT1, gradient_BT1 * held_BT1)
        return gradient_BTV, None, None, None, None
