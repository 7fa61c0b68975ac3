"""Which law of lengths the iteration itself supports: hints, spreads and median as told, or others. Pure.

A job is told how far hints are off, how far lengths are apart and how long they are: by its config, or by iterations
that may have been of other prompts. Where that is wrong, orders of prompts mis-rank, tails look too short, and the
prompts that wait too short or too long. A few laws are compared with the responses so far, finished and unfinished:

    score(law) = log likelihood of responses and hints under it - CHANGE_COSTS * (values that are not as told)

    responses     of `GROUPS` prompts that have begun, spread evenly over the queue (`lengths_law.evidences`). An
                  unfinished one counts as one that is longer than it is, so that the short ones, which end first, make
                  no law look short.
    hints         by how far they are apart: the spread between prompts and their told error. They tell it before any
                  response has ended. Their mean tells nothing, because lengths may have changed since. They count as
                  `GROUPS` hints at most, so that responses can tell otherwise.

The law with the highest score counts. Spreads and hints are compared first, with the median as told, and the median
under the best of these. Where another median is better, spreads and hints are compared again with it.

A law whose hints tell nothing has an error of hints far above the spread between prompts: such hints give no order
either (`opening_order`).

Invariants:
- While few responses have ended, and hints are as far apart as they should, the law is as told.
  [test_supported_law: before_responses_have_ended]
- A law that is told right stays. [test_supported_law: told_right_stays]
- Hints of other prompts are dropped. [test_supported_law: hints_of_other_prompts]
- A spread that is told half is widened, with hints at once. [test_supported_law: told_half_is_widened]
  [test_supported_law: hints_tell_a_wrong_spread]
- A median that is told half is raised. [test_supported_law: median_that_is_told_half]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.policy.lengths_law import LEAST_SIGMA, evidences, observed, priors, variance_of_hints
from services.scheduler.state.costs import LengthLaw
from services.scheduler.state.observed import Generation

GROUPS = 48
"""A comparison costs in proportion. With 24 prompts a wrong law is found some ten seconds later."""

CHANGE_COSTS = 4.0
"""In units of log likelihood: the responses have to be 50 times as likely before a value is not taken as told."""

SPREADS = (1.0, 0.5, 0.7, 1.4, 2.0)
"""Factors of the told spreads, between prompts and within groups alike."""

MEDIANS = (0.5, 0.7, 1.4, 2.0)
"""Factors of the told median."""

HINTS = (1.0, 2.0)
"""Factors of the told error of hints; besides, hints may tell nothing."""

NO_HINT = 20.0
"""The error of a hint that tells nothing, over the spread between prompts."""


def supported_law(picture: Generation, law: LengthLaw) -> LengthLaw:
    if not picture.num_unfinished:
        return law
    begun = np.flatnonzero((picture.length_of.reshape(-1, picture.group_size) > 0).any(axis=1))
    groups = begun[np.linspace(0, begun.size - 1, min(GROUPS, begun.size)).astype(np.int64)]
    seen, hints = observed(picture, groups), picture.hint_of[groups]
    has_ends, has_hints = bool(seen.num_known.any()), bool(picture.hints)
    if not (has_ends or has_hints):
        return law
    spread_of_hints = _SpreadOfHints.of(picture, law)

    def best_of(laws: Sequence[LengthLaw]) -> LengthLaw:
        """The law with the highest score; of several the first."""
        scores = [spread_of_hints.log_likelihood(other) - CHANGE_COSTS * _num_changed(law, other) for other in laws]
        if has_ends:
            spreads = [max(other.sigma_group, LEAST_SIGMA) for other in laws]
            found = evidences(seen, *priors(hints, laws), spreads)
            scores = [score + each for score, each in zip(scores, found, strict=True)]
        return laws[scores.index(max(scores))]

    best = best_of([*_spreads_and_hints(law, has_hints=has_hints)])
    medians = [replace(best, log_mean=law.log_mean + math.log(factor)) for factor in MEDIANS]
    other = best_of([best, *medians])
    if other is best:
        return best
    return best_of([other, *_spreads_and_hints(replace(law, log_mean=other.log_mean), has_hints=has_hints)])


@dataclass(frozen=True, slots=True)
class _SpreadOfHints:
    """How far the hints of an iteration are apart, in logarithms of tokens."""

    variance: float
    num_hints: int
    error: float
    """As told: hints that tell nothing of their prompts still tell how far prompts are apart."""

    @classmethod
    def of(cls, picture: Generation, told: LengthLaw) -> _SpreadOfHints:
        variance, num_hints = variance_of_hints(picture)
        return cls(variance, min(GROUPS, num_hints), told.sigma_hint)

    def log_likelihood(self, law: LengthLaw) -> float:
        """Up to a constant. Of normal values, by their variance around their own mean."""
        expected = max(LEAST_SIGMA**2, law.sigma_prompt**2 + self.error**2)
        return -self.num_hints / 2 * (math.log(expected) + self.variance / expected)


def _num_changed(told: LengthLaw, other: LengthLaw) -> int:
    """How many values of a law are not as told; both spreads change together."""
    names = ("log_mean", "sigma_prompt", "sigma_hint")
    return sum(getattr(other, name) != getattr(told, name) for name in names)


def _spreads_and_hints(law: LengthLaw, *, has_hints: bool) -> Iterator[LengthLaw]:
    """The law with each spread and each error of hints; the law itself first."""
    for spread in SPREADS:
        wider = replace(law, sigma_prompt=law.sigma_prompt * spread, sigma_group=law.sigma_group * spread)
        errors = [law.sigma_hint * factor for factor in HINTS] if has_hints else [law.sigma_hint]
        if has_hints:
            errors.append(max(law.sigma_hint, NO_HINT * wider.sigma_prompt))
        for error in dict.fromkeys(errors):
            yield replace(wider, sigma_hint=error)
