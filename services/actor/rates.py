"""The actor's training rate in each layout, and the fixed part of an update, for its progress pictures. Pure.

    seconds = a + b * tokens

- seconds: the time of an update. tokens: its response tokens.
- a: the fixed part of an update, which more GPUs do not shorten. It is the same in every layout.
- 1 / b: a layout's rate, in tokens per second.

How a is estimated:
1. Least squares over the updates of all layouts fit a. Only updates of one layout with different tokens contribute.
2. Sizes differ little at first, so the fit is drawn towards a prior: the last estimate, or else the config's
   assumption. Its weight is (NOISE_SHARE / PRIOR_SHARE)^2: the scatter of updates against the possible error of the
   prior.
3. While the prior outweighs the updates (for good if all updates have one size), there is no new fit. Then a is the
   last fit or, without one, the assumption, but at most half of the shortest mean update. The limit guards the rate: an
   assumption that the measurement refutes must not make it unbounded.

The actor reports a once it was fitted, or once the measurement refutes the assumption. It does not report a mere
assumption: the scheduler has the assumption itself, or an earlier lead's measurement.
Later updates count more. The first update in a layout builds what later ones reuse: it counts only until the second.

Invariants:
- a is at least 0. [test_rates: seconds_that_fall_with_the_tokens]
- a is at most `MOST_SHARE` of the shortest mean update. [test_rates: most_share_of_the_shortest_mean_update]
- Every rate is finite and above 0. [test_rates: rates_are_finite_and_above_0]
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tidegate.codec import encode_layout
from tidegate.types import Layout
from tidegate.v1 import events_pb2

KEPT = 0.8
"""The factor on earlier updates' sums at each update. The sums thus cover some five updates."""
PRIOR_SHARE = 0.5
"""The possible error of the assumed fixed part, as a share of a mean update."""
NOISE_SHARE = 0.05
"""The scatter of updates around the line, as a share of a mean update.

With both shares, five updates whose tokens vary by a tenth outweigh the assumption four to one. Five updates whose
tokens vary by a hundredth hardly move it."""
MOST_SHARE = 0.9
"""The largest fixed part, as a share of an update. Beyond it, a rate is a division by nearly 0."""


@dataclass(slots=True)
class _UpdateSums:
    """Weighted sums over a layout's updates: of 1, tokens, seconds, tokens^2 and tokens * seconds."""

    num_updates: int = 0
    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_2: float = 0.0
    tokens_seconds: float = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        kept = KEPT if self.num_updates > 1 else 0.0
        self.num_updates += 1
        self.count = kept * self.count + 1
        self.tokens = kept * self.tokens + num_tokens
        self.seconds = kept * self.seconds + seconds
        self.tokens_2 = kept * self.tokens_2 + num_tokens**2
        self.tokens_seconds = kept * self.tokens_seconds + num_tokens * seconds

    def rate(self, update_s: float) -> float:
        return self.tokens / (self.seconds - update_s * self.count)


@dataclass(slots=True)
class TrainingRates:
    """`assumed_s` is the fixed part of an update that the config assumes."""

    assumed_s: float
    _sums: dict[Layout, _UpdateSums] = field(default_factory=dict)
    _last_fit_s: float | None = None
    """The last fitted fixed part. None before the first fit."""

    def note(self, layout: Layout, *, num_tokens: int, seconds: float) -> None:
        """Note the time of an update of `num_tokens` response tokens."""
        if num_tokens > 0 and seconds > 0:
            sums = self._sums.pop(layout, None) or _UpdateSums()
            sums.note(num_tokens, seconds)
            self._sums[layout] = sums
            prior_s = self._fixed_s()
            assert prior_s is not None, "an update was just noted"
            fitted_s = _fitted_s(self._sums.values(), prior_s)
            self._last_fit_s = self._last_fit_s if fitted_s is None else fitted_s

    def update_s(self) -> float | None:
        """The fixed part of an update. None while it is only assumed."""
        fixed_s = self._fixed_s()
        return None if self._last_fit_s is None and fixed_s == self.assumed_s else fixed_s

    def _fixed_s(self) -> float | None:
        """The fixed part, fitted or assumed. None before the first update."""
        if not self._sums:
            return None
        least_s = _least_s(self._sums.values())
        return (
            min(self.assumed_s, least_s / 2)
            if self._last_fit_s is None
            else min(self._last_fit_s, MOST_SHARE * least_s)
        )

    def expected_s(self, layout: Layout, *, num_tokens: int) -> float | None:
        """The expected time of an update. None where no update was measured in this layout."""
        sums, update_s = self._sums.get(layout), self._fixed_s()
        if sums is None or update_s is None:
            return None
        return update_s + num_tokens / sums.rate(update_s)

    def by_layout(self) -> list[events_pb2.TrainerRate]:
        """The rate of each measured layout; the layout of the last update comes last."""
        update_s = self._fixed_s()
        if update_s is None:
            return []
        return [
            events_pb2.TrainerRate(layout=encode_layout(layout), rate_tokens_per_s=each.rate(update_s))
            for layout, each in self._sums.items()
        ]


def _least_s(measured: Collection[_UpdateSums]) -> float:
    return min(each.seconds / each.count for each in measured)


def _fitted_s(measured: Collection[_UpdateSums], prior_s: float) -> float | None:
    """The fitted fixed part. None while the prior outweighs the updates.

    Least squares over a and every layout's b, with b eliminated and the prior added:

        a = (weight * prior_s + sum(Y - X * XY / XX)) / (weight + sum(n - X^2 / XX)), at least 0

    - sum: over the layouts; n: the weighted count of updates.
    - X, Y: the weighted sums of tokens and of seconds; XX, XY: those of tokens^2 and of tokens * seconds.
    - weight: the weight of the prior, which must not exceed sum(n - X^2 / XX).
    """
    weight = (NOISE_SHARE / PRIOR_SHARE) ** 2
    evidence = sum(each.count - each.tokens**2 / each.tokens_2 for each in measured)
    evidence_s = sum(each.seconds - each.tokens * each.tokens_seconds / each.tokens_2 for each in measured)
    if evidence < weight:
        return None
    return max(0.0, (weight * prior_s + evidence_s) / (weight + evidence))
