"""Runs the sequences of a micro-batch one after another without padding (THD), and puts the logits back into rows.

For all code but the model a micro-batch stays padded. Its tokens are taken out of their rows before the model, and the
logits are put back into rows after it. So losses and log-probabilities are independent of this form. The model's
attention must separate sequences by `cu_seqlens`: Transformer Engine's does, and needs CUDA (`te_attention`).

Invariants:
- Each token has the position that it has in its row.
- Logits are 0 where there was padding.

Legend of shapes: B sequences, S padded positions, T positions of all sequences, V of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, slots=True)
class Unpadded:
    shape: tuple[int, int]
    """B and S."""
    places_T: torch.Tensor
    """The place of each token in the flattened [B, S]."""
    position_ids_1T: torch.Tensor
    cu_seqlens: torch.Tensor
    """[B + 1] in int32: where each sequence begins and the last one ends. Rows without tokens are omitted."""
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], shape: tuple[int, int], device: torch.device) -> Unpadded:
        """`lengths` are those of the first rows. Further rows hold nothing."""
        ends = torch.tensor([0, *lengths], device=device).cumsum(0)
        position_ids = torch.cat([torch.arange(length, device=device) for length in lengths])
        rows = torch.arange(len(lengths), device=device).repeat_interleave(ends.diff())
        return cls(shape, rows * shape[1] + position_ids, position_ids[None], ends.int(), max(lengths))

    def taken_out(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """[1, T]."""
        return tokens_BS.reshape(-1)[self.places_T][None]

    def put_back(self, logits_1TV: torch.Tensor) -> torch.Tensor:
        """[B, S, V], differentiable."""
        rows, length = self.shape
        flat = logits_1TV.new_zeros((rows * length, logits_1TV.size(-1)))
        return flat.index_copy(0, self.places_T, logits_1TV[0]).view(rows, length, -1)

    @property
    def params(self) -> PackedSeqParams:
        """The parameters for Megatron's attention and rotary embedding."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )


def check_unpadded(config: TransformerConfig) -> None:
    """Raises ValueError for a layout that must cut or distribute sequences as rows."""
    has = {
        "context parallelism": config.context_parallel_size > 1,
        "expert parallelism": config.expert_model_parallel_size > 1,
        "sequence parallelism": config.sequence_parallel,
    }
    if faults := [name for name, there_is in has.items() if there_is]:
        raise ValueError(
            f"packing=thd does not support {' and '.join(faults)}, which this layout has: use packing=padded"
        )


def te_attention() -> type:
    """Transformer Engine's attention, for `GptProvider`. Raises ValueError where it is not installed."""
    if not transformer_engine.HAVE_TE:
        raise ValueError(
            "packing=thd needs the attention of Transformer Engine, which is not installed here and runs on CUDA "
            "only: install transformer-engine, or use packing=padded"
        )
    attention: type = transformer_engine.TEDotProductAttention
    return attention
