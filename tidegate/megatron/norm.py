"""RMSNorm for Megatron's layers without Transformer Engine or Apex, under sequence parallelism too.

Megatron's own torch norm refuses sequence parallelism. There a norm sees a part of the positions, so that its weight's
gradient has to be added up over the tp ranks; Megatron does that for each weight that is marked `sequence_parallel`.
Invariant: otherwise it is torch's RMSNorm, bit for bit.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Built as Megatron builds norms; extra arguments that it gives some of them are of no meaning here."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)
