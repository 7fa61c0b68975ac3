"""How fast the actor trains in each layout, and what of an update no GPU makes shorter, as its pictures tell it. Pure.

An update of x tokens takes a + b x seconds: a, the same in every layout, is what no GPU makes shorter, and 1/b a
layout's rate. Updates of one layout whose tokens differ tell a, by least squares over all layouts; as they differ
little it is known badly at first. So it is drawn to what was known before, or to what the config assumes: by how far
that may be off (`PRIOR_SHARE` of an update) against how far updates scatter (`NOISE_SHARE`). While that weighs more
than what updates tell, and for good where they are all of one size, a is as it was known last, or as assumed, or half
of an update's time where that is less: an assumption that the measurement refutes must not make a rate without bounds.
What is only assumed is not told, as the scheduler has the assumption, or what an earlier lead measured; what refutes
the assumption is. Later updates count more; the first in a layout, which builds what the others find there, only until
there is another.

Invariants: a is at least 0, and at most `MOST_SHARE` of the shortest mean update; every rate is finite and above 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tidegate.codec import encode_layout
from tidegate.types import Layout
from tidegate.v1 import events_pb2

KEPT = 0.8
"""Of what was measured before, at each update: some five of them."""
PRIOR_SHARE = 0.5
"""Of a mean update: how far the assumed part may be off."""
NOISE_SHARE = 0.05
"""Of a mean update: how far one is from the line. With both, five updates whose tokens vary by a tenth outvote the
assumption four to one, and such as vary by a hundredth hardly move it."""
MOST_SHARE = 0.9
"""Of an update, that no GPU makes shorter: beyond it a rate is a division by nearly nothing."""


@dataclass(slots=True)
class _Measured:
    """Sums over a layout's updates: of 1, tokens, seconds, and their products."""

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
    """`assumed_s`: what of an update no GPU makes shorter, by the config."""

    assumed_s: float
    _measured: dict[Layout, _Measured] = field(default_factory=dict)
    _known_s: float | None = None
    """When it was known last."""

    def note(self, layout: Layout, *, num_tokens: int, seconds: float) -> None:
        """An update of so many response tokens took so long."""
        if num_tokens > 0 and seconds > 0:
            known = self._measured.pop(layout, None) or _Measured()
            known.note(num_tokens, seconds)
            self._measured[layout] = known
            prior_s = self._fixed_s()
            assert prior_s is not None, "an update was noted"
            fitted_s = _fitted_s(self._measured.values(), prior_s)
            self._known_s = self._known_s if fitted_s is None else fitted_s

    def update_s(self) -> float | None:
        """What of an update no GPU makes shorter; None while that is only assumed."""
        fixed_s = self._fixed_s()
        return None if self._known_s is None and fixed_s == self.assumed_s else fixed_s

    def _fixed_s(self) -> float | None:
        """Measured or assumed; None before an update."""
        if not self._measured:
            return None
        least_s = _least_s(self._measured.values())
        return min(self.assumed_s, least_s / 2) if self._known_s is None else min(self._known_s, MOST_SHARE * least_s)

    def expected_s(self, layout: Layout, *, num_tokens: int) -> float | None:
        """Of an update; None where none was measured in the layout."""
        known, update_s = self._measured.get(layout), self._fixed_s()
        if known is None or update_s is None:
            return None
        return update_s + num_tokens / known.rate(update_s)

    def told(self) -> list[events_pb2.TrainerRate]:
        """The layout that was trained in last is the last."""
        update_s = self._fixed_s()
        if update_s is None:
            return []
        return [
            events_pb2.TrainerRate(layout=encode_layout(layout), rate_tokens_per_s=each.rate(update_s))
            for layout, each in self._measured.items()
        ]


def _least_s(measured: Collection[_Measured]) -> float:
    return min(each.seconds / each.count for each in measured)


def _fitted_s(measured: Collection[_Measured], prior_s: float) -> float | None:
    """Least squares over a and every layout's b, the latter eliminated: a * sum(n - X^2 / XX) = sum(Y - X XY / XX).
    None while what was known or assumed before weighs more."""
    weight = (NOISE_SHARE / PRIOR_SHARE) ** 2
    known = sum(each.count - each.tokens**2 / each.tokens_2 for each in measured)
    told = sum(each.seconds - each.tokens * each.tokens_seconds / each.tokens_2 for each in measured)
    if known < weight:
        return None
    return max(0.0, (weight * prior_s + told) / (weight + known))
