"""Attention under context parallelism without Transformer Engine. Megatron has context parallelism only there.

1. Each cp rank holds two slices of a sequence (tidegate/megatron/context.py). Megatron's rotary embedding turns them by
   their positions.
2. Keys and values of all ranks are gathered.
3. Each rank's queries see the keys at or before their global positions.

Invariants:
- With one cp rank this is Megatron's attention unchanged.
- The gradients of gathered keys and values are added up over the ranks that saw them.

Legend of shapes: Q this rank's positions, S all, in rank order after the gathering, B sequences, N heads of H elements,
D = N * H.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from tidegate.megatron.context import all_positions, positions


class GatheringAttention(DotProductAttention):  # type: ignore[misc]  # Megatron is untyped
    def __init__(
        self, config: TransformerConfig, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any
    ) -> None:
        # transformer/dot_product_attention.py:57 refuses any other size, because it lacks the gathering below.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, pg_collection=pg_collection, **kwargs)
        self._cp_group = pg_collection.cp

    def forward(
        self,
        query_QBNH: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        cp = self._cp_group.size()
        if cp > 1:
            keys, values = (
                gather_from_sequence_parallel_region(part.contiguous(), group=self._cp_group) for part in (keys, values)
            )
            attention_mask = self._hidden(keys.size(0), query_QBNH.device)
        context_QBD: torch.Tensor = super().forward(query_QBNH, keys, values, attention_mask, **kwargs)
        return context_QBD

    def _hidden(self, length: int, device: torch.device) -> torch.Tensor:
        """[1, 1, Q, S]: True where a key's position is after the query's."""
        cp, cp_rank = self._cp_group.size(), self._cp_group.rank()
        own_Q = positions(length, cp=cp, cp_rank=cp_rank, device=device)
        seen_S = all_positions(length, cp=cp, device=device)
        return (seen_S[None, :] > own_Q[:, None])[None, None]
