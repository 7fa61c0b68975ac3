"""The rate at which one GPU of the inference computes log-probabilities, for its progress pictures. Pure.

The rate counts response tokens, because forecasts are of response lengths. With a reference policy a token takes two
passes, which the rate includes. Later calls count more. The first call builds kernels and does not count, so a new lead
does not replace the former lead's rate by a slow one.

Invariant: the rate is finite and above 0. [test_rates: scoring_rate_is_finite_and_above_0]
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.9
"""The factor on earlier calls' sums at each call. The sums thus cover some ten calls, of a few groups each."""


@dataclass(slots=True)
class ScoringRate:
    _num_calls: int = 0
    _tokens: float = 0.0
    _gpu_s: float = 0.0

    def note(self, *, num_tokens: int, num_gpus: int, seconds: float) -> None:
        """Note a call that all GPUs computed together."""
        if num_tokens <= 0 or num_gpus <= 0 or seconds <= 0:
            return
        self._num_calls += 1
        if self._num_calls > 1:
            self._tokens = KEPT * self._tokens + num_tokens
            self._gpu_s = KEPT * self._gpu_s + num_gpus * seconds

    def tokens_per_s_per_gpu(self) -> float | None:
        """The rate. None before the second call."""
        return self._tokens / self._gpu_s if self._num_calls > 1 else None
