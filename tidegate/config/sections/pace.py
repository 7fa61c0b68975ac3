"""The config's section `cluster.pace`: the speed of a cited GPU for each slot, and the size of the job that it models.

The defaults are Qwen2.5-7B in bf16 on one H100 of 80 GB. `M` marks a published measurement, `F` a value that is fitted
to published figures, and `ours` a choice without a source. `tidegate.pace.law` has the formulas.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.config.base import NonNegativeFloat, Positive, PositiveFloat, Section

_Mfu = Annotated[float, Field(gt=0, le=1)]
_Scale = Annotated[float, Field(ge=1e-6, le=1e6)]


class PaceSection(Section):
    """Speeds are in modelled seconds and tokens. The first four keys translate them into those of this job."""

    time_scale: _Scale = 1.0
    """Ours. The seconds of this job for one modelled second, in every kind of step."""
    tokens_per_token: Positive = 1
    """Ours. The modelled tokens for which one token of this job stands."""
    responses_per_response: Positive = 1
    """Ours. The modelled responses for which one response of this job stands."""
    cores_per_slot: PositiveFloat = 0.1
    """Ours. The budget of a slot: the CPU cores that the real work of its steps may take."""
    decode_base_s: PositiveFloat = 5.9e-3
    """M: step of batch 1. Kernel times of SGLang 0.5.14, aiconfigurator 0.12.0, TP 1."""
    decode_per_sequence_s: NonNegativeFloat = 8.7e-6
    """F: to the same table at 1k of context: 7.7 ms at batch 64, 9.3 ms at 128, 13 ms at 256."""
    decode_per_kv_token_s: NonNegativeFloat = 18.6e-9
    """F: to the same table: 57,344 bytes a token at 92 % of 3.35 TB/s."""
    decode_host_share: NonNegativeFloat = 0.07
    """F: measured steps are 4 to 9 % above the kernels' times: gpustack's 7.14 to 7.4 ms for Qwen3-8B on an H100."""
    prefill_tokens_per_s: PositiveFloat = 45_000.0
    """M: aiconfigurator, prompts of 4k, TP 1: 69 % of the peak."""
    parameters: PositiveFloat = 7.6e9
    """Qwen2.5-7B's. A trained token takes 6 FLOP a parameter; attention is in the MFU, as in its source."""
    peak_flops: PositiveFloat = 989e12
    """M: dense bf16 of an H100, NVIDIA's data sheet."""
    train_mfu: _Mfu = 0.27
    """F: to RLinf's figure 9, 7B with Megatron: 368, 200 and 112 s an iteration on 64, 128 and 256 H100. The MFU of an
    update without end."""
    train_half_tokens: NonNegativeFloat = 52_500.0
    """F: to the same figure, with its four updates an iteration. The tokens of an update for one GPU at which the MFU
    is half of `train_mfu`."""
    score_tokens_per_s: PositiveFloat = 19_200.0
    """M: log-probabilities in RLinf's figure 9, 7B on 64 H100, one forward pass of one policy."""
