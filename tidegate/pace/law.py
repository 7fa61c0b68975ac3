"""The law of modelled slots: the least time of each kind of step, in seconds of this job.

One token of the job stands for T = `tokens_per_token` tokens of the modelled job, one response for
R = `responses_per_response`, and a modelled second lasts S = `time_scale` seconds. In modelled units:

    decode step   (1 + host_share) * (base_s + per_sequence_s * sequences + per_kv_token_s * kv_tokens)
    prefill       tokens / prefill_tokens_per_s
    update        6 * parameters * tokens / (peak_flops * mfu(tokens))
    mfu(tokens)   train_mfu * tokens / (tokens + train_half_tokens)
    scoring       tokens * policies / score_tokens_per_s

    sequences, kv_tokens   those that run on the engine, and their tokens in its cache at the start of the step
    tokens                 of an update or a scoring: those of the busiest GPU

A token of the job takes T decode steps, over which the cache grows. The first token of a response comes with its
prefill. The law knows neither the policy nor the layout of any other component.

Invariants:
- A step with more work takes no less time. [test_law: more_work_takes_no_less_time]
- `time_scale` multiplies every kind of step alike. [test_law: time_scale_multiplies_every_kind]
- An update in portions takes as long as the whole. [test_law: portions_of_an_update]
- The law meets the figures that its numbers are from. [test_law: meets_the_published_kernel_times]
  [test_law: meets_the_published_iterations]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.config.sections.pace import PaceSection
from tidegate.types import Layout

FLOP_PER_PARAMETER = 6
"""Forward and backward, for each trained token."""


@dataclass(frozen=True, slots=True)
class PaceLaw:
    """Arguments count sequences and tokens of this job."""

    pace: PaceSection

    def decode_s(self, *, num_sequences: int, num_kv_tokens: int) -> float:
        """One token for each sequence. `num_kv_tokens`: the tokens of all in the cache, before the step."""
        pace, steps = self.pace, self.pace.tokens_per_token
        sequences = pace.responses_per_response * num_sequences
        grown = sequences * (steps - 1) / 2
        kv_tokens = pace.responses_per_response * steps * num_kv_tokens + grown
        step_s = (
            pace.decode_base_s + pace.decode_per_sequence_s * sequences + pace.decode_per_kv_token_s * kv_tokens
        ) * (1 + pace.decode_host_share)
        return pace.time_scale * steps * step_s

    def prefill_s(self, num_tokens: int) -> float:
        return self.pace.time_scale * self._modelled(num_tokens) / self.pace.prefill_tokens_per_s

    def mfu(self, num_tokens: float) -> float:
        """The model FLOP utilisation of an update with `num_tokens` modelled tokens on each GPU."""
        return self.pace.train_mfu * num_tokens / (num_tokens + self.pace.train_half_tokens)

    def portion_s(self, replicas: Sequence[Sequence[int]], layout: Layout) -> float:
        """Micro-batches of an update, without its fixed part. `replicas`: the tokens of each, by replica.

        A pipeline also waits for its first and last micro-batch: (pp - 1) / vpp of a mean one.
        """
        stages = layout.tp * layout.pp * layout.cp
        longest = 0.0
        for micro_batches in replicas:
            bubble = (layout.pp - 1) / layout.vpp / len(micro_batches) if micro_batches else 0.0
            longest = max(longest, sum(micro_batches) * (1 + bubble))
        return self._training_s(self._modelled(longest) / stages)

    @property
    def update_s(self) -> float:
        """The fixed part of an update, which no number of GPUs shortens: the MFU law's half-saturation tokens."""
        return self._training_s(self.pace.train_half_tokens)

    def training_s(self, replicas: Sequence[Sequence[int]], layout: Layout) -> float:
        """A whole update."""
        return self.portion_s(replicas, layout) + self.update_s

    def scoring_s(self, num_tokens: int, layout: Layout, *, num_policies: int = 1) -> float:
        """The log-probabilities of the busiest replica's tokens."""
        modelled = self._modelled(num_tokens) * num_policies / (layout.tp * layout.pp * layout.cp)
        return self.pace.time_scale * modelled / self.pace.score_tokens_per_s

    def _training_s(self, num_tokens: float) -> float:
        """At `train_mfu`; the half-saturation tokens, added to an update's own, make it the MFU law."""
        pace = self.pace
        return pace.time_scale * num_tokens * FLOP_PER_PARAMETER * pace.parameters / (pace.peak_flops * pace.train_mfu)

    def _modelled(self, num_tokens: float) -> float:
        return self.pace.tokens_per_token * self.pace.responses_per_response * num_tokens
