"""Which law of lengths the iteration itself supports: hints and spreads as told, or others. Pure.

A job is told how far hints are off and how far lengths are apart: by its config, or by iterations that may have been
of other prompts. Where that is wrong, orders of prompts mis-rank and tails look too short. A few laws are compared with
the responses so far, finished and unfinished:

    score(law) = log likelihood of the responses under it - CHANGE_COSTS * (values that are not as told)

    likelihood    of `GROUPS` prompts that have begun, spread evenly over the queue (`lengths_law.evidence`). It counts
                  an unfinished response as one that is longer than it is, so that the short ones, which end first, make
                  no law look short.

The law with the highest score counts. A law whose hints tell nothing has an error of hints far above the spread between
prompts: such hints give no order either (`opening_order`).

Invariants:
- While few responses have ended, the law is as told. [test_supported_law: before_responses_have_ended]
- A law that is told right stays. [test_supported_law: told_right_stays]
- Hints of other prompts are dropped. [test_supported_law: hints_of_other_prompts]
- A spread that is told half is widened. [test_supported_law: told_half_is_widened]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from services.scheduler.policy.lengths_law import LEAST_SIGMA, evidence, observed, prior
from services.scheduler.state.costs import LengthLaw
from services.scheduler.state.observed import Generation

GROUPS = 48
"""A comparison costs in proportion. With 24 prompts a wrong law is found some ten seconds later."""

CHANGE_COSTS = 4.0
"""In units of log likelihood: the responses have to be 50 times as likely before a value is not taken as told."""

SPREADS = (1.0, 0.5, 0.7, 1.4, 2.0)
"""Factors of the told spreads, between prompts and within groups alike."""

HINTS = (1.0, 2.0)
"""Factors of the told error of hints; besides, hints may tell nothing."""

NO_HINT = 20.0
"""The error of a hint that tells nothing, over the spread between prompts."""


def supported_law(picture: Generation, law: LengthLaw) -> LengthLaw:
    begun = np.flatnonzero((picture.length_of.reshape(-1, picture.group_size) > 0).any(axis=1))
    if not begun.size or not picture.num_unfinished:
        return law
    groups = begun[np.linspace(0, begun.size - 1, min(GROUPS, begun.size)).astype(np.int64)]
    seen = observed(picture, groups)
    if not seen.num_known.any():
        return law
    best, best_score = law, -np.inf
    for other, num_changed in _laws(law, has_hints=bool(picture.hints)):
        mean, variance = prior(picture, other)
        found = evidence(seen, mean[groups], variance[groups], max(other.sigma_group, LEAST_SIGMA))
        if found - CHANGE_COSTS * num_changed > best_score:
            best, best_score = other, found - CHANGE_COSTS * num_changed
    return best


def _laws(law: LengthLaw, *, has_hints: bool) -> Iterator[tuple[LengthLaw, int]]:
    """Each law with the number of its values that are not as told; the told one first."""
    for spread in SPREADS:
        wider = replace(law, sigma_prompt=law.sigma_prompt * spread, sigma_group=law.sigma_group * spread)
        errors = [law.sigma_hint * factor for factor in HINTS] if has_hints else [law.sigma_hint]
        if has_hints:
            errors.append(max(law.sigma_hint, NO_HINT * wider.sigma_prompt))
        for error in dict.fromkeys(errors):
            changed = (spread != 1.0) + (error != law.sigma_hint)
            yield replace(wider, sigma_hint=error), changed
