"""Runs micro-batches through a rank's model chunks with Megatron's schedule, forward only or with gradients.

- The ranks of a pipeline, and of an expert-parallel group, get the same shapes. Stages exchange shapes only where they
  differ between micro-batches.
- The ranks of a context-parallel group get the same batches and cut them.
- Interleaved stages run micro-batches in groups of pp. Fillers without weight complete the last group; the caller never
  sees them.
- Logits of a model that runs without padding (`tidegate/megatron/thd.py`) are padded again for the caller.

Invariant: logits reach the caller on the last pipeline stage only, one micro-batch after another in the input's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from tidegate.megatron.batching import TokenBatch
from tidegate.megatron.context import own_part
from tidegate.megatron.thd import Unpadded, check_unpadded

OnLogits = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]
"""(number of the micro-batch, tokens [B, S], logits [B, S/cp, V/tp] of this rank) -> (loss, value to keep)."""


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[TokenBatch],
    on_logits: OnLogits,
    *,
    groups: ProcessGroupCollection,
    device: torch.device,
    forward_only: bool,
) -> list[Any]:
    """The kept values of each micro-batch on the last stage; [] on the others. Without batches nothing runs."""
    if not batches:
        return []
    config = get_model_config(chunks[0])
    num_sequences, length = batches[0].shape
    is_thd = any(batch.lengths is not None for batch in batches)
    if is_thd:
        check_unpadded(config)
    config.variable_seq_lengths = is_thd or any(batch.shape != batches[0].shape for batch in batches)
    pp = groups.pp.size()
    interleaved = len(chunks) > 1
    run = [*batches, *_fillers(batches, pp)] if interleaved else list(batches)
    with torch.set_grad_enabled(not forward_only):
        kept: list[Any] = get_forward_backward_func(pp_size=pp, vp_size=len(chunks) if interleaved else None)(
            forward_step_func=_forward_step(on_logits, groups, len(batches), device),
            data_iterator=[enumerate(run) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(run),
            seq_length=length,
            micro_batch_size=num_sequences,
            forward_only=forward_only,
            p2p_communicator=P2PCommunicator(pp_group=groups.pp, config=config) if pp > 1 else None,
            pg_collection=groups,
        )
    return kept[: len(batches)]


def _fillers(batches: Sequence[TokenBatch], pp: int) -> list[TokenBatch]:
    filler = replace(batches[-1], sequences=(), tokens_BS=np.zeros_like(batches[-1].tokens_BS))
    return [filler] * (-len(batches) % pp)


def _forward_step(
    on_logits: OnLogits, groups: ProcessGroupCollection, num_batches: int, device: torch.device
) -> Callable[[Iterator[tuple[int, TokenBatch]], Any], Any]:
    def forward_step(batches: Iterator[tuple[int, TokenBatch]], chunk: Any) -> Any:
        number, batch = next(batches)
        tokens_BS = torch.from_numpy(batch.tokens_BS).to(device)
        rows = None if batch.lengths is None else Unpadded.of(batch.lengths, batch.shape, device)
        if rows is None:
            inputs = {"input_ids": own_part(tokens_BS, groups.cp), "position_ids": None}
        else:
            inputs = {"input_ids": rows.taken_out(tokens_BS), "position_ids": rows.position_ids_1T}
            inputs["packed_seq_params"] = rows.params
        output = chunk(attention_mask=None, **inputs)

        def loss_of(logits_BQV: torch.Tensor) -> tuple[torch.Tensor, int, Any]:
            if rows is not None:
                logits_BQV = rows.put_back(logits_BQV)
            if number >= num_batches:
                return logits_BQV.sum() * 0.0, 0, None
            loss, kept = on_logits(number, tokens_BS, logits_BQV)
            # The second value is the token count by which Megatron would divide gradients: ours are divided already.
            return loss, 0, kept

        return output, loss_of

    return forward_step
