"""How fast the actor trains in each layout, and what of an update no GPU makes shorter, as its pictures tell it. Pure.

An update of x tokens takes a + b x seconds: a, the same in every layout, is what no GPU makes shorter, and 1/b a
layout's rate. Updates of one layout whose tokens differ tell a, by least squares over all layouts; as they differ
little it is known badly at first. So it is drawn to what the config assumes: by how far that may be off (`PRIOR_SHARE`
of an update) against how far updates scatter (`NOISE_SHARE`). Updates that are all of one size leave it as assumed, or
half of an update's time where that is less: an assumption that the measurement refutes must not make a rate without
bounds. Later updates count more; the first in a layout, which builds what the others find there, only until there is
another.

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

    def note(self, layout: Layout, *, num_tokens: int, seconds: float) -> None:
        """An update of so many response tokens took so long."""
        if num_tokens > 0 and seconds > 0:
            known = self._measured.pop(layout, None) or _Measured()
            known.note(num_tokens, seconds)
            self._measured[layout] = known

    def update_s(self) -> float | None:
        """What of an update no GPU makes shorter; None before one was measured."""
        return _fixed_s(self._measured.values(), self.assumed_s) if self._measured else None

    def expected_s(self, layout: Layout, *, num_tokens: int) -> float | None:
        """Of an update; None where none was measured in the layout."""
        known, update_s = self._measured.get(layout), self.update_s()
        if known is None or update_s is None:
            return None
        return update_s + num_tokens / known.rate(update_s)

    def told(self) -> list[events_pb2.TrainerRate]:
        """The layout that was trained in last is the last."""
        update_s = self.update_s()
        if update_s is None:
            return []
        return [
            events_pb2.TrainerRate(layout=encode_layout(layout), rate_tokens_per_s=each.rate(update_s))
            for layout, each in self._measured.items()
        ]


def _fixed_s(measured: Collection[_Measured], assumed_s: float) -> float:
    """Least squares over a and every layout's b, the latter eliminated: a * sum(n - X^2 / XX) = sum(Y - X XY / XX)."""
    least_s = min(each.seconds / each.count for each in measured)
    prior_s = min(assumed_s, least_s / 2)
    weight = (NOISE_SHARE / PRIOR_SHARE) ** 2
    known = sum(each.count - each.tokens**2 / each.tokens_2 for each in measured)
    told = sum(each.seconds - each.tokens * each.tokens_seconds / each.tokens_2 for each in measured)
    # What rounding makes of updates that are all of one size is no knowledge.
    if known < 1e-9 * sum(each.count for each in measured):
        return prior_s
    return min(max(0.0, (weight * prior_s + told) / (weight + known)), MOST_SHARE * least_s)
