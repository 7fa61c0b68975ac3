"""RMSNorm for Megatron's layers without Transformer Engine or Apex, under sequence parallelism too.

Megatron's own torch norm refuses sequence parallelism. There a norm sees a part of the positions, so its weight's
gradient must be added up over the tp ranks. Megatron does that for each weight that is marked `sequence_parallel`.

Invariant: in all else it is torch's RMSNorm, bit for bit.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Has the signature with which Megatron builds norms. Extra arguments that Megatron passes to some of them have no
    meaning here.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)
