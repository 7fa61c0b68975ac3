"""The time of a portion of a minibatch, as measured: the rate of each layout, and the fixed part of an update. Pure.

    seconds = b * load, and for the last portion, which makes the update, a more

- load: the tokens of the busiest rank, prompts included (`load_of`).
- a: the fixed part of an update, which more GPUs do not shorten. It is the same in every layout.
- b: the seconds of a token of load. It is the same for every number of copies of one kind.

From it follow:
- the time that a portion will take, so that GPUs can come at its very end;
- the rate of each measured layout in response tokens per second, which is what a policy foresees: 1 / b of its ranks
  together, by the response tokens in a token of load lately. An iteration's first minibatches have its shortest
  responses, so rates in tokens that were measured at different times would not compare.

How a is estimated:
1. Least squares over the portions of all layouts fit a and b. The portions before the last tell b. Where updates have
   one portion, only those of one kind with different loads contribute.
2. There are few portions at first, so the fit is drawn towards a prior: the last estimate, or else the config's
   assumption. Its weight is (NOISE_SHARE / PRIOR_SHARE)^2: the scatter of portions against the possible error of the
   prior.
3. While the prior outweighs the portions (for good if all updates have one portion of one size), there is no new fit.
   Then a is the last fit or, without one, the assumption, but at most half of the shortest mean update. The limit
   guards the rate: an assumption that the measurement refutes must not make it unbounded.

The actor reports a once it was fitted, or once the measurement refutes the assumption. It does not report a mere
assumption: the scheduler has the assumption itself, or an earlier lead's measurement.
Later portions count more. The first one in a layout builds what later ones reuse: it counts only until the second.

Invariants:
- a is at least 0. [test_rates: seconds_that_fall_with_the_tokens]
- a is at most `MOST_SHARE` of the shortest mean update. [test_rates: most_share_of_the_shortest_mean_update]
- Every rate is finite and above 0. [test_rates: rates_are_finite_and_above_0]
- Nothing is expected before a portion of the kind was measured. [test_rates: before_a_portion]
- A portion of the same load is expected to take as long on any number of replicas. [test_rates: as_long_on_any]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.codec import encode_layout
from tidegate.types import Layout
from tidegate.v1 import events_pb2

KEPT = 0.9
"""The factor on earlier portions' sums at each portion of the layout. The sums thus cover some ten portions."""
MIX_KEPT = 0.95
"""The factor on earlier portions' sums of response tokens and loads, over all layouts."""
PRIOR_SHARE = 0.5
"""The possible error of the assumed fixed part, as a share of a mean update."""
NOISE_SHARE = 0.05
"""The scatter of updates around the line, as a share of a mean update.

With both shares, five updates whose tokens vary by a tenth outweigh the assumption four to one. Five updates whose
tokens vary by a hundredth hardly move it."""
MOST_SHARE = 0.9
"""The largest fixed part, as a share of an update. Beyond it, a rate is a division by nearly 0."""

_Kind = tuple[int, int, int, int, int]
"""The axes of a copy: tp, pp, cp, ep, vpp."""


def load_of(lengths: Sequence[int], layout: Layout) -> float:
    """The tokens of the busiest rank: replicas share a portion nearly evenly, but no sequence. `lengths`: the tokens of
    each sequence, prompts included."""
    return max(sum(lengths) / layout.dp, max(lengths, default=0)) / (layout.tp * layout.pp * layout.cp)


@dataclass(slots=True)
class _Sums:
    """Weighted sums over a layout's portions: of seconds, load, load^2 and load * seconds. Over the last portions of
    their minibatches: of 1, load and seconds."""

    num_portions: int = 0
    seconds: float = 0.0
    load: float = 0.0
    load_2: float = 0.0
    load_seconds: float = 0.0
    num_last: float = 0.0
    last_load: float = 0.0
    last_seconds: float = 0.0

    def note(self, load: float, seconds: float, *, is_last: bool) -> None:
        kept = KEPT if self.num_portions > 1 else 0.0
        self.num_portions += 1
        self.seconds = kept * self.seconds + seconds
        self.load = kept * self.load + load
        self.load_2 = kept * self.load_2 + load**2
        self.load_seconds = kept * self.load_seconds + load * seconds
        self.num_last = kept * self.num_last + is_last
        self.last_load = kept * self.last_load + load * is_last
        self.last_seconds = kept * self.last_seconds + seconds * is_last

    def net_s(self, update_s: float) -> float:
        """The seconds without the fixed parts."""
        return self.seconds - update_s * self.num_last


@dataclass(slots=True)
class TrainingRates:
    """`assumed_s` is the fixed part of an update that the config assumes."""

    assumed_s: float
    _sums: dict[Layout, _Sums] = field(default_factory=dict)
    _last_fit_s: float | None = None
    """The last fitted fixed part. None before the first fit."""
    _tokens: float = 0.0
    _load: float = 0.0
    """Weighted sums over all portions: of response tokens, and of the loads of all ranks."""

    def note(self, layout: Layout, *, num_tokens: int, load: float, seconds: float, is_last: bool) -> None:
        """Note the time of a portion of `num_tokens` response tokens. `is_last`: it made the update."""
        if num_tokens > 0 and load > 0 and seconds > 0:
            self._tokens = MIX_KEPT * self._tokens + num_tokens
            self._load = MIX_KEPT * self._load + load * layout.num_ranks
            sums = self._sums.pop(layout, None) or _Sums()
            sums.note(load, seconds, is_last=is_last)
            self._sums[layout] = sums
            fitted_s = _fitted_s(self._sums, self._fixed_s())
            self._last_fit_s = self._last_fit_s if fitted_s is None else fitted_s

    def update_s(self) -> float | None:
        """The fixed part of an update. None while it is only assumed."""
        fixed_s = self._fixed_s()
        return None if self._last_fit_s is None and fixed_s == self.assumed_s else fixed_s

    def expected_s(self, layout: Layout, lengths: Sequence[int]) -> float | None:
        """The expected time of a last portion with these sequences. None before one of such copies was measured."""
        token_s = self._token_s(layout)
        return None if token_s is None else self._fixed_s() + load_of(lengths, layout) * token_s

    def tokens_in(self, layout: Layout, seconds: float) -> float | None:
        """The tokens of all ranks that are expected in a portion of so many seconds, prompts included. None as in
        `expected_s`."""
        token_s = self._token_s(layout)
        return None if token_s is None else seconds / token_s * layout.num_ranks

    def _token_s(self, layout: Layout) -> float | None:
        """The seconds of a token of load. None before a portion of such copies was measured."""
        alike = [each for other, each in self._sums.items() if _kind_of(other) == _kind_of(layout)]
        update_s = self._fixed_s()
        return sum(each.net_s(update_s) for each in alike) / sum(each.load for each in alike) if alike else None

    def by_layout(self) -> list[events_pb2.TrainerRate]:
        """The rate of each measured layout; the layout of the last portion comes last."""
        update_s = self._fixed_s()
        return [
            events_pb2.TrainerRate(
                layout=encode_layout(layout),
                rate_tokens_per_s=each.load / each.net_s(update_s) * layout.num_ranks * self._tokens / self._load,
            )
            for layout, each in self._sums.items()
        ]

    def _fixed_s(self) -> float:
        """The fixed part, fitted or assumed."""
        fixed_s, most = (self.assumed_s, 0.5) if self._last_fit_s is None else (self._last_fit_s, MOST_SHARE)
        least_s = _least_s(self._sums.values())
        return fixed_s if least_s is None else min(fixed_s, most * least_s)


def _kind_of(layout: Layout) -> _Kind:
    return layout.tp, layout.pp, layout.cp, layout.ep, layout.vpp


def _least_s(measured: Collection[_Sums]) -> float | None:
    """The shortest mean update, with all its portions. None before an update."""
    return min((each.seconds / each.num_last for each in measured if each.num_last), default=None)


def _fitted_s(measured: Mapping[Layout, _Sums], prior_s: float) -> float | None:
    """The fitted fixed part. None while the prior outweighs the portions.

    Least squares over a and every kind's b, with b eliminated and the prior added:

        a = (weight * prior_s + sum(Y - X * XY / XX)) / (weight + sum(n - X^2 / XX)), at least 0

    - sum: over the kinds of copies; n: the weighted count of last portions.
    - X, Y: the weighted sums of loads and of seconds of last portions; XX, XY: those of load^2 and of load * seconds of
      all portions.
    - weight: the weight of the prior, which must not exceed sum(n - X^2 / XX).
    """
    weight = (NOISE_SHARE / PRIOR_SHARE) ** 2
    evidence = evidence_s = 0.0
    kinds: dict[_Kind, list[_Sums]] = {}
    for layout, each in measured.items():
        kinds.setdefault(_kind_of(layout), []).append(each)
    for of_kind in kinds.values():
        load = sum(each.last_load for each in of_kind)
        load_2 = sum(each.load_2 for each in of_kind)
        evidence += sum(each.num_last for each in of_kind) - load**2 / load_2
        slope = sum(each.load_seconds for each in of_kind) / load_2
        evidence_s += sum(each.last_seconds for each in of_kind) - load * slope
    if evidence < weight:
        return None
    return max(0.0, (weight * prior_s + evidence_s) / (weight + evidence))
