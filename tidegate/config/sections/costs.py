"""The config's section `assumptions`: times and lengths that a policy assumes until the job has measured its own.

The defaults hold for a 7B model on 64 GPUs of 80 GB. They equal the simulator's defaults, so that both predict alike;
`simulator.cost_model` names the source of each. A job's measurements replace these assumptions:
- the trainer's rate in a layout, and the fixed part of a minibatch that more GPUs do not shorten;
- the rate of inference;
- the speed of decoding;
- the lengths of responses.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from tidegate.config.base import Count, NonNegativeFloat, NumGpus, PositiveFloat, Section

_Spread = Annotated[float, Field(gt=0, le=5)]
LEAST_RATE, MOST_RATE = 1e-3, 1e15
_Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
"""A rate per second.

The lower bound equals that of the simulator's scenarios: with a lower rate no work ends. Within the bounds, a rate that
is computed for another number of GPUs stays above 0 and below infinity.
"""
MEDIAN_SHARE = 7050 / 27_648
"""The assumed median length of a response, as a share of the longest legal response.

It is that of the published 64-GPU timeline. A job with much shorter responses is taken for a longer job until its first
iteration is over.
"""


class CostsSection(Section):
    """Times in seconds, and rates. One decode step takes

        max(decode_floor_s,
            decode_base_s + decode_per_sequence_s * num_sequences + decode_per_kv_token_s * num_kv_tokens)

    num_sequences   running sequences of the engine
    num_kv_tokens   tokens of these sequences in the engine's KV cache
    """

    decode_floor_s: PositiveFloat = 14.1e-3
    decode_base_s: NonNegativeFloat = 4.0e-3
    decode_per_sequence_s: NonNegativeFloat = 1.5e-5
    decode_per_kv_token_s: NonNegativeFloat = 9.0e-9
    update_s: NonNegativeFloat = 8.0
    """The fixed part of a minibatch's time, which more GPUs do not shorten."""
    release_s: NonNegativeFloat = 2.1
    acquire_s: NonNegativeFloat = 1.5
    resubmit_s: NonNegativeFloat = 1.0
    """The pause of a sequence that moves to another engine."""
    prefill_tokens_per_s: _Rate = 40_000.0
    reshard_s: NonNegativeFloat = 1.25
    """The time of every change of the trainer's layout if `weight_bytes` is 0. Otherwise the next five keys set it."""
    reshard_setup_s: NonNegativeFloat = 0.5
    communicators_s: NonNegativeFloat = 0.37
    """The time to build the communicators of a layout that the trainer has not had yet."""
    reshard_bytes_per_s: _Rate = 25e9
    """The rate at which one rank sends or receives."""
    weight_bytes: Count = 0
    """The bytes of the whole model's weights."""
    optimizer_bytes: Count = 0
    """The bytes of the whole optimizer state: 12 a parameter in bf16, for main parameters and moments."""
    load_s: NonNegativeFloat = 5.0
    """The time to load the state into a trainer that had no GPUs."""
    inference_start_s: NonNegativeFloat = 2.0
    trainer_tokens_per_s: _Rate = 182_000.0
    """The rate on `trainer_gpus` GPUs. `trainer_rate` has the rate on another number."""
    trainer_gpus: NumGpus = 64
    trainer_exponent: Annotated[float, Field(gt=0, le=1)] = 0.4
    inference_tokens_per_s: _Rate = 26_000.0
    """The rate of one GPU."""

    def trainer_rate(self, num_gpus: int) -> float:
        """Tokens a second on `num_gpus` GPUs:

        trainer_tokens_per_s * (num_gpus / trainer_gpus) ** trainer_exponent
        """
        return self.trainer_tokens_per_s * math.pow(num_gpus / self.trainer_gpus, self.trainer_exponent)


class LengthsSection(Section):
    """The distribution of the logarithm of a response's number of tokens."""

    median_tokens: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """None: `MEDIAN_SHARE` of `algorithm.max_new_tokens`."""
    sigma_prompt: _Spread = 0.5
    """The spread between prompts."""
    sigma_group: _Spread = 0.25
    """The spread within a group."""
    sigma_hint: _Spread = 0.3
    """The error of a length hint from an earlier epoch."""

    def log_mean(self, max_new_tokens: int) -> float:
        return math.log(self.median_tokens or MEDIAN_SHARE * max_new_tokens)


class AssumptionsSection(Section):
    costs: CostsSection = CostsSection()
    lengths: LengthsSection = LengthsSection()
