"""How fast the actor trains in each layout, as its pictures tell it. Pure.

Of an update only what GPUs make shorter counts: `update_s` is left out of its time, or half of it where that is less,
since an assumption that the measurement refutes must not make a rate without bounds. Later updates count more: the
first ones in a layout build what the others find there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.codec import encode_layout
from tidegate.types import Layout
from tidegate.v1 import events_pb2

KEPT = 0.8
"""Of what was measured before, at each update: some five of them."""


@dataclass(slots=True)
class _Measured:
    num_tokens: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class TrainingRates:
    """`update_s`: what of an update no GPU makes shorter."""

    update_s: float
    _measured: dict[Layout, _Measured] = field(default_factory=dict)

    def note(self, layout: Layout, *, num_tokens: int, seconds: float) -> None:
        """An update of so many response tokens took so long."""
        if num_tokens <= 0 or seconds <= 0:
            return
        known = self._measured.setdefault(layout, _Measured())
        known.num_tokens = KEPT * known.num_tokens + num_tokens
        known.seconds = KEPT * known.seconds + max(seconds - self.update_s, seconds / 2)

    def expected_s(self, layout: Layout, *, num_tokens: int) -> float | None:
        """Of an update; None where none was measured in the layout."""
        known = self._measured.get(layout)
        if known is None:
            return None
        shared_s = num_tokens / known.num_tokens * known.seconds
        return shared_s + min(self.update_s, shared_s)

    def told(self) -> list[events_pb2.TrainerRate]:
        return [
            events_pb2.TrainerRate(layout=encode_layout(layout), rate_tokens_per_s=each.num_tokens / each.seconds)
            for layout, each in self._measured.items()
        ]
