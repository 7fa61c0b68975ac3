"""The rank processes of the THD tests: one model padded and without padding, with an attention of our own.

`Segmented` replaces Transformer Engine's attention, one sequence at a time, so that all other code of this path through
Megatron runs on a CPU.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from tests.integration.megatron import small_job
from tests.ranks import RankContext, Results
from tidegate.elastic.plan.layout import Mesh
from tidegate.megatron.attention import GatheringAttention
from tidegate.megatron.batching import TokenBatch, replica_batches
from tidegate.megatron.gpt_provider import DTYPES, GptProvider
from tidegate.megatron.log_probs import token_log_probs
from tidegate.megatron.packing import Packing, TokenCap
from tidegate.megatron.parallel import ParallelRanks, Rendezvous, parallel
from tidegate.megatron.schedule import run_micro_batches
from tidegate.megatron.thd import te_attention
from tidegate.types import Layout

MAX_TOKENS = 120


class Segmented(GatheringAttention):
    def forward(
        self,
        query_QBNH: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert packed_seq_params is not None
        parts = []
        for first, end in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            query, key, value = (part[first:end].unsqueeze(1) for part in (query_QBNH, keys, values))
            parts.append(super().forward(query, key, value, attention_mask, **kwargs))
        return torch.cat(parts).squeeze(1)


def compared(context: RankContext, *, layout: dict[str, int], device: str = "cpu", precision: str = "fp32") -> Results:
    """Log-probabilities and gradients, as PACKING/NAME. On CUDA with Transformer Engine's attention."""
    rendezvous = Rendezvous(
        context.rank, context.world_size, context.port, timeout_s=context.timeout_s, listen_fd=context.listen_fd
    )
    place = torch.device(device)
    with parallel(rendezvous, Layout(**layout), device=place, seed=0) as ranks:
        results: Results = {}
        for packing in Packing:
            settings = small_job.trainer_settings(precision=precision)
            provider = GptProvider(settings.model, settings.padded_vocab, dtype=DTYPES[settings.precision])
            if packing is Packing.THD:
                attention = Segmented if device == "cpu" else te_attention()
                provider = dataclasses.replace(provider, core_attention=attention)
            found = _run(provider, ranks, context.rank, packing, place)
            results |= {f"{packing.value}/{name}": values for name, values in found.items()}
        return results


def _run(provider: GptProvider, ranks: ParallelRanks, me: int, packing: Packing, device: torch.device) -> Results:
    mesh: Mesh = provider.mesh(ranks.layout, tuple(range(ranks.layout.num_ranks)))
    chunks = provider.build(mesh, me, ranks.groups, device=device)
    provider.initialise(chunks, mesh, me, seed=0)
    sequences = [sample.tokens for sample in small_job.recorded_samples()]
    batches = replica_batches(sequences, TokenCap.of_model(provider.config, MAX_TOKENS, packing=packing))

    def on_logits(number: int, tokens_BS: torch.Tensor, logits_BQV: torch.Tensor) -> tuple[torch.Tensor, Any]:
        log_probs_BS = token_log_probs(
            logits_BQV, tokens_BS, vocab_size=provider.config.vocab_size, temperature=0.9, groups=ranks.groups
        )
        weight_BS = _weights(batches[number], sequences).to(device)
        return (log_probs_BS * weight_BS).sum(), log_probs_BS.detach().float().cpu().numpy()

    kept = run_micro_batches(chunks, batches, on_logits, groups=ranks.groups, device=device, forward_only=False)
    results = {
        f"log_probs/{index}": log_probs_BS[row, : len(sequences[index])]
        for batch, log_probs_BS in zip(batches, kept, strict=bool(kept))
        for row, index in enumerate(batch.sequences)
    }
    for name, tensor in provider.local_parameters(chunks, mesh, me):
        assert tensor.grad is not None, name
        results[f"grad/{name}"] = tensor.grad.float().cpu().numpy()
    return results


def _weights(batch: TokenBatch, sequences: list[tuple[int, ...]]) -> torch.Tensor:
    """A different weight for each token, and 0 for padding."""
    weight_BS = np.zeros(batch.shape, np.float32)
    for row, index in enumerate(batch.sequences):
        weight_BS[row, : len(sequences[index])] = np.random.default_rng(index).random(len(sequences[index]))
    return torch.from_numpy(weight_BS)
