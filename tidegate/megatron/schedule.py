"""Runs micro-batches through a rank's model chunks with Megatron's schedule, forward only or with gradients.

Invariants: logits reach the caller on the last pipeline stage only, one micro-batch after the other in the given order;
the ranks of a pipeline are given the same shapes, which are exchanged between stages only where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from tidegate.megatron.batching import TokenBatch

OnLogits = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]
"""(number of the micro-batch, tokens [B, S], this tp rank's logits [B, S, V/tp]) -> (loss, what to keep)."""


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[TokenBatch],
    on_logits: OnLogits,
    *,
    device: torch.device,
    forward_only: bool,
) -> list[Any]:
    """What `on_logits` kept of each micro-batch, on the last stage; [] on the others. No batches: nothing runs."""
    if not batches:
        return []
    config = get_model_config(chunks[0])
    num_sequences, length = batches[0].shape
    config.variable_seq_lengths = any(batch.shape != batches[0].shape for batch in batches)
    with torch.set_grad_enabled(not forward_only):
        kept: list[Any] = get_forward_backward_func()(
            forward_step_func=_forward_step(on_logits, device),
            data_iterator=enumerate(batches),
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=num_sequences,
            forward_only=forward_only,
        )
    return kept


def _forward_step(on_logits: OnLogits, device: torch.device) -> Callable[[Iterator[tuple[int, TokenBatch]], Any], Any]:
    def forward_step(batches: Iterator[tuple[int, TokenBatch]], chunk: Any) -> Any:
        number, batch = next(batches)
        tokens_BS = torch.from_numpy(batch.tokens_BS).to(device)
        output = chunk(input_ids=tokens_BS, position_ids=None, attention_mask=None)

        def loss_of(logits_BSV: torch.Tensor) -> tuple[torch.Tensor, int, Any]:
            loss, kept = on_logits(number, tokens_BS, logits_BSV)
            # The token count that Megatron would divide gradients by: ours are divided already.
            return loss, 0, kept

        return output, loss_of

    return forward_step
