"""How long the unfinished responses will be: a posterior of each prompt's level, and a length for each response. Pure.

A response's tokens are lognormal (`LengthLaw`):

    log(tokens) = level + spread
    level     of the prompt: normal, with mean log_mean and deviation sigma_prompt
    spread    of the response within its group: normal, with mean 0 and deviation sigma_group

Order:
1. A prompt's hint gives the prior of its level (`prior`).
2. Its responses turn the prior into a posterior: a finished response by its length, an unfinished one by having come
   so far.
3. The m unfinished responses of a prompt get the quantiles (1/2, 3/2, ..., m - 1/2) / m of the law, cut off below at
   their present lengths. Quantiles are used, and not the mean for each response, because a group is released by its
   longest member, and the longest of several means is no mean of the longest.

Sources:
- The prior is the usual normal-normal shrinkage.
- Expectation-maximisation for censored normal data finds where the posterior lies (Dempster, Laird and Rubin 1977,
  section 4.3). It needs the normal hazard E[z | z > a] = pdf(a) / (1 - cdf(a)).
- Around there the posterior is computed at `NODES` points. Censored data give it a longer upper side than any normal
  law has, and the last responses of an iteration are those with the longest upper sides. Under a normal law they were
  forecast 5 to 8 % too few tokens, and the longest of them a quarter too few.

Invariants:
- A finished response has its length. [test_lengths_law: a_finished_response_keeps_its_length]
- An unfinished response gets longer than it is, and no longer than the law's most.
  [test_lengths_law: an_unfinished_response_gets_longer]
- Nothing is drawn: the same picture gives the same lengths. [test_lengths_law: the_same_picture_gives]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.scheduler.state.costs import LengthLaw
from services.scheduler.state.observed import CUT, ENDED, Floats, Generation, Ints

ROUNDS = 2
"""Rounds of expectation-maximisation. They only place the nodes."""

NODES = 13
LOWEST, HIGHEST = -3.5, 5.5
"""A posterior is computed between its most likely level + LOWEST and + HIGHEST of its deviations."""

_NODES = np.linspace(LOWEST, HIGHEST, NODES)

MORE_TOKENS = 20.0
"""An unfinished response makes at least so many. Without it, a response at the end of its law would end at once."""

GOLDEN = (math.sqrt(5) - 1) / 2
"""Any number of its multiples modulo 1 fills the interval evenly, and neighbours are far apart (Weyl)."""

LEAST_SIGMA = 1e-3
"""A smaller deviation counts as this one: a division by it would have no meaning."""

_EDGE, _PER_UNIT = 6.0, 1000
"""The range of the normal tables, and their points a unit. None of an iteration's thousands lies beyond 6 sigma."""

_FAR = 12.0
"""The upper end of the table of log(1 - cdf). A response may be far beyond a level that is hardly likely."""


def _normal_tables() -> tuple[Floats, Floats, Floats, Floats]:
    """At z from -6 to 6: z, cdf(z), and the hazard; from -6 to 12: log(1 - cdf(z))."""
    z = np.linspace(-_EDGE, _EDGE, round(2 * _EDGE * _PER_UNIT) + 1)
    cdf = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in z])
    far = np.linspace(-_EDGE, _FAR, round((_EDGE + _FAR) * _PER_UNIT) + 1)
    beyond = np.array([0.5 * math.erfc(each / math.sqrt(2)) for each in far])
    hazard = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) / beyond[: z.size]
    return z, cdf, hazard, np.log(beyond)


_Z, _CDF, _HAZARD, _LOG_BEYOND = _normal_tables()


def final_lengths(picture: Generation, law: LengthLaw, *, is_spread: bool = True) -> Floats:
    """By sequence: its length where it has ended, else the length that it is expected to end with.

    `is_spread` says which point of its posterior a prompt's level is:
    - True: another quantile for each prompt, so that all levels together are as far apart as the true ones.
    - False: the mean, which says best which of two prompts is longer.
    """
    lengths = picture.length_of.astype(np.float64)
    open_at = np.flatnonzero(picture.is_unfinished)
    if not open_at.size:
        return lengths
    group_of = open_at // picture.group_size
    logs = np.log(np.maximum(lengths, 1.0))
    spread = max(law.sigma_group, LEAST_SIGMA)
    nodes, weights = _posterior(picture, law, spread)
    level = _points(nodes, weights) if is_spread else (nodes * weights).sum(axis=1)
    level_of = level[group_of]
    below = _cdf((logs[open_at] - level_of) / spread)
    nth, num_open = _place_in_group(group_of, picture.num_groups)
    shares = (nth + 0.5) / num_open
    z = np.interp(below + shares * (1.0 - below), _CDF, _Z)
    ends = np.maximum(np.exp(level_of + spread * z), lengths[open_at] + MORE_TOKENS)
    lengths[open_at] = np.maximum(np.minimum(ends, law.max_tokens or math.inf), lengths[open_at] + 1.0)
    return lengths


def prior(picture: Generation, law: LengthLaw) -> tuple[Floats, Floats]:
    """By prompt: mean and variance of its level before any of its responses began (`priors`)."""
    mean, variance = priors(picture.hint_of, (law,))
    return mean[0], variance[0]


def priors(hints: Floats, laws: Sequence[LengthLaw]) -> tuple[Floats, Floats]:
    """By law and prompt: mean and variance of its level before any of its responses began. `hints`: by prompt, 0 where
    it has none.

    A hint is the level under lognormal noise. So the level, given the hint, is normal:

        mean = w log(hint) + (1 - w) log_mean
        variance = w sigma_hint^2
        w = sigma_prompt^2 / (sigma_prompt^2 + sigma_hint^2)     the weight of the hint

    Without a hint the mean is log_mean and the variance sigma_prompt^2.
    """
    of_prompts = np.array([max(law.sigma_prompt, LEAST_SIGMA) ** 2 for law in laws])[:, None]
    of_hints = np.array([max(law.sigma_hint, LEAST_SIGMA) ** 2 for law in laws])[:, None]
    log_mean = np.array([law.log_mean for law in laws])[:, None]
    has_hint = hints > 0
    weight = of_prompts / (of_prompts + of_hints)
    hinted = weight * np.log(np.where(has_hint, hints, 1.0)) + (1 - weight) * log_mean
    mean = np.where(has_hint, hinted, log_mean)
    return mean, np.where(has_hint, weight * of_hints, of_prompts)


def variance_of_hints(picture: Generation) -> tuple[float, int]:
    """The variance of hints' logarithms around their own mean, and the number of hints. Levels and the errors of hints
    make it together."""
    hints = picture.hint_of
    logs = np.log(hints[hints > 0])
    return (float(logs.var()) if logs.size else 0.0), logs.size


@dataclass(frozen=True, slots=True)
class Observed:
    """What some prompts have shown, in logarithms of tokens.

    known, squares, num_known: by prompt, the sum over its finished responses, that of their squares, and their number.
    censored, group_of: by response of which only a lower bound is known, this bound and the prompt's place.
    """

    known: Floats
    squares: Floats
    num_known: Ints
    censored: Floats
    group_of: Ints


def observed(picture: Generation, groups: Ints | None = None) -> Observed:
    """`groups`: the prompts; None: all.

    A response that was cut at the most tokens is censored there, like an unfinished one at its present length. A
    response that has not begun adds no information.
    """
    lengths, places = (of.reshape(-1, picture.group_size) for of in (picture.length_of, picture.place_of))
    if groups is not None:
        lengths, places = lengths[groups], places[groups]
    logs = np.log(np.maximum(lengths, 1.0))
    is_known = (places <= ENDED) & (places != CUT)
    group_of, member = np.nonzero(~is_known & ((lengths > 0) | (places == CUT)))
    known = np.where(is_known, logs, 0.0)
    return Observed(known.sum(axis=1), (known**2).sum(axis=1), is_known.sum(axis=1), logs[group_of, member], group_of)


def evidences(seen: Observed, mean: Floats, variance: Floats, spreads: Sequence[float]) -> list[float]:
    """By law: the logarithm of the likelihood of what was observed. A law has a prior of the levels, a row of `mean`
    and of `variance` with a column a prompt, and a spread of responses.

    It is the integral over each prompt's level, by the trapezoid rule at the nodes of its posterior.
    """
    nodes, likely = _nodes(_repeated(seen, len(spreads)), mean.ravel(), variance.ravel(), spreads)
    highest = likely.max(axis=1)
    integrals = np.exp(likely - highest[:, None]).sum(axis=1) * (nodes[:, 1] - nodes[:, 0])
    squares = np.array([spread**2 for spread in spreads])[:, None]
    log_scales = np.array([math.log(spread * math.sqrt(2 * math.pi)) for spread in spreads])[:, None]
    normal = -0.5 * mean**2 / variance - 0.5 * np.log(2 * math.pi * variance)
    members = -0.5 * seen.squares / squares - seen.num_known * log_scales
    by_level = (highest + np.log(integrals)).reshape(mean.shape)
    found: list[float] = (by_level + normal + members).sum(axis=1).tolist()
    return found


def _repeated(seen: Observed, times: int) -> Observed:
    """The same prompts so many times, one after the other."""
    offsets = seen.known.size * np.arange(times)[:, None]
    return Observed(
        known=np.tile(seen.known, times),
        squares=np.tile(seen.squares, times),
        num_known=np.tile(seen.num_known, times),
        censored=np.tile(seen.censored, times),
        group_of=(offsets + seen.group_of).ravel(),
    )


def _posterior(picture: Generation, law: LengthLaw, spread: float) -> tuple[Floats, Floats]:
    """By prompt and node: a level, and how likely it is."""
    nodes, likely = _nodes(observed(picture), *prior(picture, law), [spread])
    weights = np.exp(likely - likely.max(axis=1, keepdims=True))
    return nodes, weights / weights.sum(axis=1, keepdims=True)


def _nodes(seen: Observed, mean: Floats, variance: Floats, spreads: Sequence[float]) -> tuple[Floats, Floats]:
    """By prompt and node: a level, and the logarithm of its likelihood, but for factors that no level changes.

    `spreads`: of responses; the first prompts have the first one, as many the next, and so on.
    """
    groups, num_groups = seen.group_of, mean.size
    num_each = num_groups // len(spreads)
    of_members = np.repeat([1.0 / spread**2 for spread in spreads], num_each)
    spread = np.repeat(spreads, num_each)[groups]
    num_censored = np.bincount(groups, minlength=num_groups)
    precision = 1.0 / variance
    pull, total = precision * mean, precision + (seen.num_known + num_censored) * of_members
    level = mean
    for _ in range(ROUNDS):
        level_of = level[groups]
        a = (seen.censored - level_of) / spread
        hazard = _hazard(a)
        beyond = np.bincount(groups, weights=level_of + spread * hazard, minlength=num_groups)
        level = (pull + (seen.known + beyond) * of_members) / total
    # Information of a censored response = h (h - a) * that of a known one: h is the hazard at a (Fisher, normal law).
    open_information = np.bincount(groups, weights=hazard * np.maximum(hazard - a, 0.0), minlength=num_groups)
    deviation = 1.0 / np.sqrt(precision + (seen.num_known + open_information) * of_members)
    nodes = level[:, None] + deviation[:, None] * _NODES
    likely = pull[:, None] * nodes - 0.5 * precision[:, None] * nodes**2
    known = seen.known[:, None] * nodes - 0.5 * seen.num_known[:, None] * nodes**2
    likely += of_members[:, None] * known
    if groups.size:
        beyond_by_node = _log_beyond((seen.censored[:, None] - nodes[groups]) / spread[:, None])
        first = np.flatnonzero(np.diff(groups, prepend=-1))
        likely[groups[first]] += np.add.reduceat(beyond_by_node, first, axis=0)
    return nodes, likely


def _points(nodes: Floats, weights: Floats) -> Floats:
    """One quantile of each posterior. The quantiles of all posteriors are spread evenly."""
    num = len(nodes)
    shares = np.modf((np.arange(num) + 1) * GOLDEN)[0]
    until = np.cumsum(weights, axis=1) - 0.5 * weights
    low = np.clip((until <= shares[:, None]).sum(axis=1) - 1, 0, NODES - 2)
    rows = np.arange(num)
    below, above = until[rows, low], until[rows, low + 1]
    part = np.clip((shares - below) / np.maximum(above - below, 1e-12), 0.0, 1.0)
    points: Floats = nodes[rows, low] + part * (nodes[rows, low + 1] - nodes[rows, low])
    return points


def _place_in_group(group_of: NDArray[np.int64], num_groups: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """By unfinished sequence: its place among the unfinished ones of its prompt, and their number."""
    counts = np.bincount(group_of, minlength=num_groups)
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return np.arange(group_of.size) - first[group_of], counts[group_of]


def _nearest(z: Floats, until: float = _EDGE) -> NDArray[np.int64]:
    """The places in a table from -_EDGE to `until`."""
    place = np.minimum(np.maximum(z, -_EDGE), until)
    place += _EDGE
    place *= _PER_UNIT
    place += 0.5
    return place.astype(np.int64)


def _log_beyond(z: Floats) -> Floats:
    """log(1 - cdf(z))."""
    return _LOG_BEYOND.take(_nearest(z, _FAR))


def _cdf(z: Floats) -> Floats:
    return _CDF.take(_nearest(z))


def _hazard(z: Floats) -> Floats:
    """pdf(z) / (1 - cdf(z)). Beyond the table its asymptote z + 1 / z stands for it."""
    return np.where(z > _EDGE, z + 1.0 / np.maximum(z, 1.0), _HAZARD.take(_nearest(z)))
