"""What a policy assumes of times and lengths until a job has measured them: the config's section `assumptions`.

The defaults are of a 7B model on 64 GPUs of 80 GB: those that the simulator has (`simulator.costs`, where each names
its source), so that both predict alike. What the job itself measures goes before them: the trainer's rate in a layout
and what of a minibatch no GPU makes shorter, inference's rate, the speed of decoding, and the lengths of its responses.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from tidegate.config.base import Count, NonNegativeFloat, NumGpus, PositiveFloat, Section

_Spread = Annotated[float, Field(gt=0, le=5)]
_Rate = Annotated[float, Field(ge=1e-3, le=1e15)]
"""A second. The simulator's scenarios have the same least, below which nothing ends; what is told of other numbers of
GPUs stays above 0, and below infinity."""
MEDIAN_SHARE = 7050 / 27_648
"""Of the longest response that is allowed: the assumed lengths of the published 64-GPU timeline. A job whose responses
are much shorter is taken for a longer one until its first iteration is over."""


class CostsSection(Section):
    """Seconds and rates. A decode step takes `decode_base_s` and so much for each sequence and each KV token that
    runs, and at least `decode_floor_s`."""

    decode_floor_s: PositiveFloat = 14.1e-3
    decode_base_s: NonNegativeFloat = 4.0e-3
    decode_per_sequence_s: NonNegativeFloat = 1.5e-5
    decode_per_kv_token_s: NonNegativeFloat = 9.0e-9
    update_s: NonNegativeFloat = 8.0
    """What of a minibatch no GPU makes shorter."""
    release_s: NonNegativeFloat = 2.1
    acquire_s: NonNegativeFloat = 1.5
    resubmit_s: NonNegativeFloat = 1.0
    """For which a sequence that moves stands still."""
    prefill_tokens_per_s: _Rate = 40_000.0
    reshard_s: NonNegativeFloat = 1.25
    """Of every change of the trainer's layout, where `weight_bytes` is 0; else the next five say what each takes."""
    reshard_setup_s: NonNegativeFloat = 0.5
    communicators_s: NonNegativeFloat = 0.37
    """To build the groups of a layout that the trainer was not in yet."""
    reshard_bytes_per_s: _Rate = 25e9
    """That a rank sends or receives."""
    weight_bytes: Count = 0
    optimizer_bytes: Count = 0
    """Of the whole model, and of what its optimizer keeps: 12 a parameter in bf16, with main parameters and moments."""
    load_s: NonNegativeFloat = 5.0
    """Of a trainer that had no GPUs."""
    inference_start_s: NonNegativeFloat = 2.0
    trainer_tokens_per_s: _Rate = 182_000.0
    """On `trainer_gpus`; on another number by the power of `trainer_exponent`."""
    trainer_gpus: NumGpus = 64
    trainer_exponent: Annotated[float, Field(gt=0, le=1)] = 0.4
    inference_tokens_per_s: _Rate = 26_000.0
    """Of a GPU."""

    def trainer_rate(self, num_gpus: int) -> float:
        """Tokens a second."""
        return self.trainer_tokens_per_s * math.pow(num_gpus / self.trainer_gpus, self.trainer_exponent)


class LengthsSection(Section):
    """The logarithm of a response's tokens: its middle, its spread between prompts and within a group, and how far what
    an earlier epoch told is off."""

    median_tokens: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """None: `MEDIAN_SHARE` of `algorithm.max_new_tokens`."""
    sigma_prompt: _Spread = 0.5
    sigma_group: _Spread = 0.25
    sigma_hint: _Spread = 0.3

    def log_mean(self, max_new_tokens: int) -> float:
        return math.log(self.median_tokens or MEDIAN_SHARE * max_new_tokens)


class AssumptionsSection(Section):
    """Until the job has measured its own."""

    costs: CostsSection = CostsSection()
    lengths: LengthsSection = LengthsSection()
