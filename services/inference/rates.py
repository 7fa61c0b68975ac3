"""How fast a GPU of inference computes log-probabilities, as its pictures tell it. Pure.

Of response tokens, as lengths are forecast; with a reference policy a token takes two passes, and that is in the rate.
Later calls count more; the first, in which kernels are built, counts for nothing, so that a new lead unsays nothing
that the one before it told.
Invariant: the rate is finite and above 0.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.9
"""Of what was measured before, at each call: some ten of them, which are of a few groups each."""


@dataclass(slots=True)
class ScoringRate:
    _num_calls: int = 0
    _tokens: float = 0.0
    _gpu_s: float = 0.0

    def note(self, *, num_tokens: int, num_gpus: int, seconds: float) -> None:
        """A call that all GPUs computed."""
        if num_tokens <= 0 or num_gpus <= 0 or seconds <= 0:
            return
        self._num_calls += 1
        if self._num_calls > 1:
            self._tokens = KEPT * self._tokens + num_tokens
            self._gpu_s = KEPT * self._gpu_s + num_gpus * seconds

    def tokens_per_s_per_gpu(self) -> float | None:
        """None before the second call."""
        return self._tokens / self._gpu_s if self._num_calls > 1 else None
